"""One rank's expert weights and their two grouped products by DeepGEMM, per weight format.

The kernels write what they please into rows without an expert; nothing may read those.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_moe_ep.deepgemm.activation_cast import (
    ScaledRows,
    activation_format,
    cast_activation,
    cast_and_gather,
    check_activation_dtype,
)
from vllm_moe_ep.deepgemm.contiguous_layout import ContiguousLayout
from vllm_moe_ep.deepgemm.loading import DeepGemm
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.errors import UnsupportedError


class ExpertGemms(Protocol):
    """The products of one rank's experts.

    Attributes:
        bundle: the library they run on.
        num_local_experts: experts held.
        device: where the weights are.
    """

    bundle: DeepGemm
    num_local_experts: int
    device: torch.device

    def up(self, hidden_states: Tensor, layout: ContiguousLayout) -> Tensor:
        """bf16 [num_tokens, hidden_size] -> bf16 [max_rows, rows of the first projection]."""
        ...

    def down(self, rows: Tensor, layout: ContiguousLayout) -> Tensor:
        """bf16 [max_rows, moe_intermediate_size] -> bf16 [max_rows, hidden_size]."""
        ...


class Bf16Gemms:
    """bf16 weights.

    Args:
        w13_weight: [num_local_experts, n, hidden_size], n the rows of the first projection;
            [num_local_experts, hidden_size, n] with ``is_transposed``.
        w2_weight: [num_local_experts, hidden_size, moe_intermediate_size], likewise.

    Raises:
        UnsupportedError: the weights are not bf16.
        ValueError: they hold different numbers of experts, or are on different devices.
    """

    def __init__(
        self,
        bundle: DeepGemm,
        w13_weight: Tensor,
        w2_weight: Tensor,
        is_transposed: bool = False,
    ) -> None:
        for name, weight in (("w13_weight", w13_weight), ("w2_weight", w2_weight)):
            if weight.dtype != torch.bfloat16:
                raise UnsupportedError(
                    f"{name} must be bfloat16 for DeepGEMM, found {weight.dtype}: serve with "
                    "--dtype bfloat16."
                )
        _check_pair(w13_weight, w2_weight)
        form = "nn" if is_transposed else "nt"
        self.bundle = bundle
        self.num_local_experts = w13_weight.shape[0]
        self.device = w13_weight.device
        self._gemm = bundle.functions[f"m_grouped_bf16_gemm_{form}_contiguous"]
        self._weights = (w13_weight, w2_weight)
        self._out_dim = 2 if is_transposed else 1

    def up(self, hidden_states: Tensor, layout: ContiguousLayout) -> Tensor:
        check_activation_dtype(hidden_states)
        return self._product(layout.gather(hidden_states), self._weights[0], layout)

    def down(self, rows: Tensor, layout: ContiguousLayout) -> Tensor:
        return self._product(rows, self._weights[1], layout)

    def _product(self, rows: Tensor, weight: Tensor, layout: ContiguousLayout) -> Tensor:
        out = rows.new_empty(rows.shape[0], weight.shape[self._out_dim])
        self._gemm(rows, weight, out, layout.grouped_layout, **_layout_form(self.bundle))
        return out


@dataclass(frozen=True, slots=True)
class QuantisedFormat:
    """What the checkpoint says of its weights.

    Attributes:
        name: "fp8" or "fp4".
        scale_fmt: "float32" or "ue8m0", as stored.
        activation_scheme: "dynamic": activations are scaled by their own values.
    """

    name: str
    scale_fmt: str
    activation_scheme: str = "dynamic"


class Fp8Fp4Gemms:
    """fp8 or fp4 weights with block scales in the device's form, activations cast to fp8.

    Args:
        w13: values [num_local_experts, n, hidden_size], from ``prepare_fp8_weight`` or
            ``prepare_fp4_weight``.
        w2: values [num_local_experts, hidden_size, moe_intermediate_size].

    Raises:
        UnsupportedError: static activation scales, or no kernel for the format or the blocks on
            the device.
        ValueError: the two hold different numbers of experts, or are on different devices.
    """

    def __init__(
        self, bundle: DeepGemm, w13: ScaledWeight, w2: ScaledWeight, weight_format: QuantisedFormat
    ) -> None:
        if weight_format.activation_scheme != "dynamic":
            raise UnsupportedError(
                "DeepGEMM's experts scale activations by their own values; the checkpoint asks "
                f"for activation_scheme {weight_format.activation_scheme!r}: use --moe-backend "
                "auto."
            )
        if bundle.capability[0] == 9 and 1 in (w13.block_n, w2.block_n):
            # The kernel does not check this: it would read the scales of other rows.
            raise UnsupportedError(
                "DeepGEMM's grouped kernel on SM90 reads one weight scale per 128x128 block; "
                "these weights have one per row: use --moe-backend auto."
            )
        _check_pair(w13.values, w2.values)
        self.bundle = bundle
        self.num_local_experts = w13.values.shape[0]
        self.device = w13.values.device
        self._gemm = bundle.functions["m_grouped_fp8_fp4_gemm_nt_contiguous"]
        self._weights = (w13, w2)
        self._fmt = activation_format(
            weight_format.name, weight_format.scale_fmt, bundle.capability[0]
        )

    def up(self, hidden_states: Tensor, layout: ContiguousLayout) -> Tensor:
        rows = cast_and_gather(hidden_states, layout.token_of_row.clamp(min=0), self._fmt)
        return self._product(rows, self._weights[0], layout)

    def down(self, rows: Tensor, layout: ContiguousLayout) -> Tensor:
        return self._product(cast_activation(rows, self._fmt), self._weights[1], layout)

    def _product(self, rows: ScaledRows, weight: ScaledWeight, layout: ContiguousLayout) -> Tensor:
        shape = (rows.values.shape[0], weight.values.shape[1])
        out = torch.empty(shape, dtype=torch.bfloat16, device=rows.values.device)
        self._gemm(
            (rows.values, rows.scale),
            (weight.values, weight.scale),
            out,
            layout.grouped_layout,
            recipe_a=self._fmt.block_size,
            recipe_b=(weight.block_n, self._fmt.block_size[1]),
            # Scales are in the device's form already; on SM90 they must stay as they are.
            disable_ue8m0_cast=True,
            **_layout_form(self.bundle),
        )
        return out


def _layout_form(bundle: DeepGemm) -> dict[str, Any]:
    """SM100 reads running sums only if it is told so."""
    return {"use_psum_layout": True} if bundle.capability[0] == 10 else {}


def _check_pair(w13: Tensor, w2: Tensor) -> None:
    if w13.shape[0] != w2.shape[0]:
        raise ValueError(
            f"w13 holds {w13.shape[0]} experts and w2 {w2.shape[0]}; both must hold the same ones."
        )
    if w13.device != w2.device:
        raise ValueError(
            f"w13 is on {w13.device} and w2 on {w2.device}: DeepGEMM's experts need one device "
            "per process; do not spread the model over devices inside one."
        )
