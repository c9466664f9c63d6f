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
from vllm_moe_ep.deepgemm.workspace import (
    block_bytes,
    columns_in,
    passes,
    rows_in,
    split_block,
)
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
    """Where the rows of this pass are."""

    row_of_pair: Tensor
    expert_ends: Tensor
    num_rows: int


class HopperExperts:
    """This rank's experts on DeepGEMM's contiguous layout.

    Args:
        bundle: the library, loaded for the weights' format.
        weights: held by reference.
        kernels: the work around the products.
        expert_map: int32 [num_experts], local id or -1; None where every expert is local.
        swiglu_limit: clamp of the activation, or None.
        max_pass_rows: more rows than this are computed in several passes, one after the other
            in the same memory; None: in one.

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
        max_pass_rows: int | None = None,
    ) -> None:
        _check_device(bundle)
        check_weights(weights)
        self.bundle = bundle
        self.weights = weights
        self.kernels = kernels
        self.expert_map = expert_map
        self.swiglu_limit = swiglu_limit
        self.max_pass_rows = max_pass_rows
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
        num_tokens = out.shape[0]
        if num_tokens == 0:
            return out
        with self._tile_height(alignment):
            for rows in passes(num_tokens, self.max_pass_rows or num_tokens):
                part = RoutedTokens(
                    hidden_states[rows], tokens.topk_ids[rows], tokens.topk_weights[rows]
                )
                self._pass(part, alignment, out[rows])
        return out

    def workspace_bytes(self, num_tokens: int, top_k: int, alignment: int) -> int:
        """Bytes of the block that a step takes, its largest pass's."""
        first = next(passes(num_tokens, self.max_pass_rows or num_tokens))
        num_rows = self._num_rows((first.stop - first.start) * top_k, alignment)
        return block_bytes(self._sizes(num_rows))

    def _pass(self, tokens: RoutedTokens, alignment: int, out: Tensor) -> None:
        step = self._plan(tokens.topk_ids, alignment)
        rows = (self._fp8 if self.weights.is_fp8 else self._bf16)(tokens.hidden_states, step)
        self.kernels.combine_rows(rows, step.row_of_pair, tokens.topk_weights, out)

    def _plan(self, topk_ids: Tensor, alignment: int) -> _Step:
        row_of_pair, ends = self.kernels.plan_rows(
            topk_ids, self.expert_map, self.num_local_experts, alignment
        )
        return _Step(row_of_pair, ends, self._num_rows(topk_ids.numel(), alignment))

    def _num_rows(self, num_pairs: int, alignment: int) -> int:
        bound = max_layout_rows(num_pairs, self.num_local_experts, alignment)
        return -(-bound // alignment) * alignment

    def _sizes(self, num_rows: int) -> tuple[int, int, int]:
        """Bytes of the products' inputs, outputs and input scales; of each, one lives at a time."""
        n, width, hidden_size = self._widths
        input_width = max(hidden_size, width)
        output_bytes = num_rows * max(n, hidden_size) * torch.bfloat16.itemsize
        if not self.weights.is_fp8:
            return num_rows * input_width * torch.bfloat16.itemsize, output_bytes, 0
        scale_bytes = _scale_stride(num_rows) * input_width // _GROUP * torch.float32.itemsize
        return num_rows * input_width, output_bytes, scale_bytes

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
        inputs, outputs, _ = split_block(self._sizes(step.num_rows), hidden_states.device)
        gathered = rows_in(inputs, step.num_rows, hidden_size, torch.bfloat16)
        self.kernels.scatter_rows(hidden_states, step.row_of_pair, gathered)
        gate_up = rows_in(outputs, step.num_rows, n, torch.bfloat16)
        self._bf16_product(gathered, self.weights.w13, gate_up, step)
        activated = rows_in(inputs, step.num_rows, width, torch.bfloat16)
        self.kernels.swiglu_rows(gate_up, step.row_of_pair, self.swiglu_limit, activated)
        rows = rows_in(outputs, step.num_rows, hidden_size, torch.bfloat16)
        self._bf16_product(activated, self.weights.w2, rows, step)
        return rows

    def _bf16_product(
        self, rows: Tensor, weight: Tensor | ScaledWeight, out: Tensor, step: _Step
    ) -> None:
        multiply = self.bundle.functions["m_grouped_bf16_gemm_nt_contiguous"]
        multiply(rows, weight, out, step.expert_ends, use_psum_layout=True)

    def _fp8(self, hidden_states: Tensor, step: _Step) -> Tensor:
        n, width, hidden_size = self._widths
        num_rows = step.num_rows
        inputs, outputs, scales = split_block(self._sizes(num_rows), hidden_states.device)
        gathered = rows_in(inputs, num_rows, hidden_size, torch.float8_e4m3fn)
        scale = _scales_in(scales, gathered)
        self.kernels.scatter_rows_fp8(hidden_states, step.row_of_pair, gathered, scale)
        gate_up = rows_in(outputs, num_rows, n, torch.bfloat16)
        self._fp8_product(gathered, scale, self.weights.w13, gate_up, step)
        activated = rows_in(inputs, num_rows, width, torch.float8_e4m3fn)
        scale = _scales_in(scales, activated)
        self.kernels.swiglu_rows_fp8(gate_up, step.row_of_pair, self.swiglu_limit, activated, scale)
        rows = rows_in(outputs, num_rows, hidden_size, torch.bfloat16)
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


def _scales_in(part: Tensor, values: Tensor) -> Tensor:
    """fp32 [rows, width / 128], one column after the other as the kernel loads them."""
    num_rows, width = values.shape
    return columns_in(part, num_rows, width // _GROUP, _scale_stride(num_rows))


def _scale_stride(num_rows: int) -> int:
    return -(-num_rows // _SCALE_ROWS_MULTIPLE) * _SCALE_ROWS_MULTIPLE


def _check_device(bundle: DeepGemm) -> None:
    if bundle.capability[0] != 9:
        raise UnsupportedError(
            f"These experts are for SM90, found SM{bundle.capability[0]}{bundle.capability[1]}."
        )


def check_weights(weights: HopperWeights) -> None:
    """That the weights have a format of SM90's kernels and fit each other.

    Raises:
        UnsupportedError: another format or size; names the remedy.
        ValueError: the two weights do not fit each other.
    """
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
