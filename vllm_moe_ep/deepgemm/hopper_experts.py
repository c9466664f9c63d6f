"""The routed experts of one rank on Hopper (SM90): plan, scatter, multiply, activate, combine.

Every shape follows from the number of tokens, and no value travels to the host: a step can be
captured in a CUDA graph. Rows of the buffers that no pair names are never read by a result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.deepgemm.contiguous_layout import max_layout_rows
from vllm_moe_ep.deepgemm.loading import DeepGemm
from vllm_moe_ep.deepgemm.row_kernels import RowKernels
from vllm_moe_ep.deepgemm.symbols import SET_ALIGNMENT
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.stages import RoutedTokens

_GROUP = 128
# DeepGEMM's fp8 kernel reads a column of scales by TMA, on 16-byte boundaries.
_SCALE_ROWS_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class HopperWeights:
    """Both projections: bf16 tensors [num_local_experts, n, k], or fp8 with fp32 block scales."""

    w13: Tensor | ScaledWeight
    w2: Tensor | ScaledWeight

    @property
    def is_fp8(self) -> bool:
        return isinstance(self.w13, ScaledWeight)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The stored values alone."""
        first, second = (
            weight.values if isinstance(weight, ScaledWeight) else weight
            for weight in (self.w13, self.w2)
        )
        return first, second


@dataclass(frozen=True, slots=True)
class _Step:
    """Where this step's rows are, and the tile height they were laid out for."""

    row_of_pair: Tensor
    expert_ends: Tensor
    num_rows: int
    alignment: int


class HopperExperts:
    """This rank's experts on DeepGEMM's contiguous layout.

    Args:
        bundle: the library, loaded for the weights' format.
        weights: held by reference.
        kernels: the work around the products.
        expert_map: int32 [num_experts], local id or -1; None where every expert is local.
        swiglu_limit: clamp of the activation, or None.

    Raises:
        UnsupportedError: the device or the weights' format is another one.
        ValueError: the two weights do not fit each other.
    """

    def __init__(
        self,
        bundle: DeepGemm,
        weights: HopperWeights,
        kernels: RowKernels,
        expert_map: Tensor | None = None,
        swiglu_limit: float | None = None,
    ) -> None:
        _check_weights(bundle, weights)
        self.bundle = bundle
        self.weights = weights
        self.kernels = kernels
        self.expert_map = expert_map
        self.swiglu_limit = swiglu_limit
        w13, w2 = weights.tensors
        self.num_local_experts: int = w13.shape[0]
        self._widths = (w13.shape[1], w2.shape[2], w2.shape[1])

    def __call__(self, tokens: RoutedTokens, alignment: int) -> Tensor:
        """Weighted sum of the local experts.

        Args:
            tokens: bf16 [num_tokens, hidden_size] with global ids.
            alignment: rows to which each expert's share is padded.

        Returns:
            bf16 [num_tokens, hidden_size]; rows without a local expert are exactly 0.

        Raises:
            UnsupportedError: the rows are not bf16, or this library has no such alignment.
        """
        hidden_states = tokens.hidden_states
        if hidden_states.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"DeepGEMM's experts take bfloat16 activations, found {hidden_states.dtype}: "
                "serve with --dtype bfloat16."
            )
        out = torch.empty(
            hidden_states.shape, dtype=hidden_states.dtype, device=hidden_states.device
        )
        if out.shape[0] == 0:
            return out
        step = self._plan(tokens.topk_ids, alignment)
        with self._tile_height(alignment):
            rows = (self._fp8 if self.weights.is_fp8 else self._bf16)(hidden_states, step)
        self.kernels.combine_rows(rows, step.row_of_pair, tokens.topk_weights, out)
        return out

    def _plan(self, topk_ids: Tensor, alignment: int) -> _Step:
        row_of_pair, ends = self.kernels.plan_rows(
            topk_ids, self.expert_map, self.num_local_experts, alignment
        )
        bound = max_layout_rows(topk_ids.numel(), self.num_local_experts, alignment)
        return _Step(row_of_pair, ends, -(-bound // alignment) * alignment, alignment)

    @contextmanager
    def _tile_height(self, alignment: int) -> Iterator[None]:
        """The library's height of a tile, which must be the layout's alignment: a process-wide
        value, put back for the library's other users."""
        if alignment == self.bundle.alignment:
            yield
            return
        set_alignment = self.bundle.functions.get(SET_ALIGNMENT)
        if set_alignment is None:
            raise UnsupportedError(
                f"{self.bundle.description} has no {SET_ALIGNMENT}: only layouts aligned to "
                f"{self.bundle.alignment} rows can be multiplied, found {alignment}."
            )
        set_alignment(alignment)
        try:
            yield
        finally:
            set_alignment(self.bundle.alignment)

    def _bf16(self, hidden_states: Tensor, step: _Step) -> Tensor:
        n, width, hidden_size = self._widths
        small, large = _buffers(hidden_states, step.num_rows, max(hidden_size, width), self._widths)
        gathered = _view(small, step.num_rows, hidden_size)
        self.kernels.scatter_rows(hidden_states, step.row_of_pair, gathered)
        gate_up = _view(large, step.num_rows, n)
        self._bf16_product(gathered, self.weights.w13, gate_up, step)
        activated = _view(small, step.num_rows, width)
        self.kernels.swiglu_rows(gate_up, step.row_of_pair, self.swiglu_limit, activated)
        rows = _view(large, step.num_rows, hidden_size)
        self._bf16_product(activated, self.weights.w2, rows, step)
        return rows

    def _bf16_product(
        self, rows: Tensor, weight: Tensor | ScaledWeight, out: Tensor, step: _Step
    ) -> None:
        multiply = self.bundle.functions["m_grouped_bf16_gemm_nt_contiguous"]
        multiply(rows, weight, out, step.expert_ends, use_psum_layout=True)

    def _fp8(self, hidden_states: Tensor, step: _Step) -> Tensor:
        n, width, hidden_size = self._widths
        # Half as many bf16 numbers hold the fp8 bytes.
        small, large = _buffers(
            hidden_states, step.num_rows, max(hidden_size, width) // 2, self._widths
        )
        bytes_ = small.view(torch.float8_e4m3fn)
        gathered = _view(bytes_, step.num_rows, hidden_size)
        scale = _scale_buffer(gathered)
        self.kernels.scatter_rows_fp8(hidden_states, step.row_of_pair, gathered, scale)
        gate_up = _view(large, step.num_rows, n)
        self._fp8_product(gathered, scale, self.weights.w13, gate_up, step)
        activated = _view(bytes_, step.num_rows, width)
        scale = _scale_buffer(activated)
        self.kernels.swiglu_rows_fp8(gate_up, step.row_of_pair, self.swiglu_limit, activated, scale)
        rows = _view(large, step.num_rows, hidden_size)
        self._fp8_product(activated, scale, self.weights.w2, rows, step)
        return rows

    def _fp8_product(
        self,
        values: Tensor,
        scale: Tensor,
        weight: Tensor | ScaledWeight,
        out: Tensor,
        step: _Step,
    ) -> None:
        assert isinstance(weight, ScaledWeight), "checked by the constructor"
        self.bundle.functions["m_grouped_fp8_fp4_gemm_nt_contiguous"](
            (values, scale),
            (weight.values, weight.scale),
            out,
            step.expert_ends,
            recipe_a=(1, _GROUP),
            recipe_b=(_GROUP, _GROUP),
            disable_ue8m0_cast=True,
            use_psum_layout=True,
        )


def _buffers(
    like: Tensor, num_rows: int, small_width: int, widths: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Memory for the products' inputs, and for their outputs: of each two, one lives at a time."""
    n, _, hidden_size = widths
    small = like.new_empty(num_rows * small_width)
    return small, like.new_empty(num_rows * max(n, hidden_size))


def _view(buffer: Tensor, num_rows: int, width: int) -> Tensor:
    return buffer[: num_rows * width].view(num_rows, width)


def _scale_buffer(values: Tensor) -> Tensor:
    """fp32 [rows, width / 128], one column after the other as the kernel loads them."""
    num_rows, width = values.shape
    stride = -(-num_rows // _SCALE_ROWS_MULTIPLE) * _SCALE_ROWS_MULTIPLE
    return torch.empty_strided(
        (num_rows, width // _GROUP), (1, stride), dtype=torch.float32, device=values.device
    )


def _check_weights(bundle: DeepGemm, weights: HopperWeights) -> None:
    if bundle.capability[0] != 9:
        raise UnsupportedError(
            f"These experts are for SM90, found SM{bundle.capability[0]}{bundle.capability[1]}."
        )
    for name, weight in (("w13", weights.w13), ("w2", weights.w2)):
        if isinstance(weight, ScaledWeight) != weights.is_fp8:
            raise ValueError("w13 and w2 must both be bf16 or both fp8.")
        if isinstance(weight, ScaledWeight):
            if weight.scale_fmt != "float32" or weight.block_n != _GROUP:
                raise UnsupportedError(
                    f"{name} must have one fp32 scale per 128x128 block, found {weight.scale_fmt} "
                    f"scales per {weight.block_n} rows: use --moe-backend auto."
                )
        elif weight.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"{name} must be bfloat16 or fp8 for DeepGEMM, found {weight.dtype}: serve with "
                "--dtype bfloat16."
            )
    w13, w2 = weights.tensors
    expected = (w13.shape[0], w13.shape[2], w13.shape[1] // 2)
    if tuple(w2.shape) != expected:
        raise ValueError(
            f"w13 {list(w13.shape)} needs a w2 of {list(expected)}, found {list(w2.shape)}."
        )
    if w13.device != w2.device:
        raise ValueError(
            f"w13 is on {w13.device} and w2 on {w2.device}: DeepGEMM's experts need one device "
            "per process."
        )
    for name, size in (("hidden_size", w13.shape[2]), ("moe_intermediate_size", w2.shape[2])):
        if size % _GROUP:
            raise UnsupportedError(
                f"DeepGEMM's experts need a {name} that is a multiple of {_GROUP}, found {size}: "
                "use --moe-backend auto."
            )
