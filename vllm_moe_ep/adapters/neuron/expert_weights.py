"""Weights of vllm-neuron's routed experts, in the kernels' layout."""

from typing import Any

import torch
from torch import Tensor, nn

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.nki.linears import NkiLinears
from vllm_moe_ep_kernels.nki.ops import nki_experts
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, why_not

_MATRICES = ("w1", "w3", "w2")
# What the wrapped forward reads besides weights.
_ATTRIBUTES = ("num_local_experts", "swiglu_limit", "ep_degree", "ep_group", "ep_rank_buf")
# The first code that this fp8 format reads as infinity or NaN.
_FIRST_SPECIAL = 0x78


class ExpertWeights(nn.Module):
    """One rank's experts in the kernels' layout, as buffers that follow the model's device.

    Attributes:
        num_inexact: numbers that the conversion changed.
    """

    def __init__(self, w13: PreparedWeight, w2: PreparedWeight, num_cores: int) -> None:
        super().__init__()
        self.num_cores = num_cores
        self.num_inexact = w13.num_inexact + w2.num_inexact
        for name, weight in (("w13", w13), ("w2", w2)):
            for part in ("codes", "scales"):
                tensor = torch.from_numpy(getattr(weight, part))
                self.register_buffer(f"{name}_{part}", tensor, persistent=False)

    def overwrite(self, other: "ExpertWeights") -> None:
        """Take the numbers of another in place: compiled graphs hold these buffers."""
        for name, buffer in self.named_buffers():
            buffer.copy_(other.get_buffer(name))
        self.num_inexact = other.num_inexact

    def forward(self, rows: Tensor, row_weight: Tensor, swiglu_limit: float) -> Tensor:
        """fp32 [rows, hidden_size]; an expert whose row_weight [experts, rows] is 0 is not read."""
        flags = (row_weight != 0).any(dim=1).to(torch.int32)[None]
        weights = (self.w13_codes, self.w13_scales, self.w2_codes, self.w2_scales)
        static = (False, max(swiglu_limit, 0.0), self.num_cores)
        return nki_experts(rows, *weights, row_weight, flags, *static)


def refusal(experts: Any, num_cores: int = 2) -> str | None:
    """Why the kernel cannot take these experts, from their parameters' shapes and dtypes alone."""
    parameters = [f"{name}_{part}" for name in _MATRICES for part in ("weight", "scale")]
    missing = [name for name in (*parameters, *_ATTRIBUTES) if not hasattr(experts, name)]
    if missing:
        return f"it has no {' and no '.join(missing)}: another version of vllm-neuron?"
    for name in _MATRICES:
        weight = getattr(experts, f"{name}_weight")
        if weight.dtype is not torch.float8_e4m3fn:
            return f"its {name}_weight is {weight.dtype}, not fp8"
    _, hidden_size, width = experts.w1_weight.shape
    return why_not(2 * width, hidden_size, num_cores, False) or why_not(
        hidden_size, width, num_cores, False, num_cores
    )


def prepared(experts: Any, num_cores: int = 2) -> ExpertWeights:
    """Lay out loaded weights, on the device that they are on.

    Raises:
        UnsupportedError: a size has no kernel, or a weight holds no finite fp8 number.
    """
    gate_up = torch.cat([_rows(experts.w1_weight), _rows(experts.w3_weight)], dim=1)
    gate_up_scale = torch.cat([experts.w1_scale, experts.w3_scale], dim=1)
    linears = NkiLinears(num_cores)
    down = _rows(experts.w2_weight)
    # A channel's scale goes to each core's part of the down columns.
    down_scale = experts.w2_scale[:, :, None].expand(-1, -1, num_cores)
    try:
        w13 = linears.lay_out(
            gate_up,
            _fp32(gate_up_scale[:, :, None]),
            (1, gate_up.shape[2]),
            is_interleaved=True,
            name="w1_weight followed by w3_weight",
        )
        w2 = linears.lay_out(
            down,
            _fp32(down_scale),
            (1, down.shape[2] // num_cores),
            k_parts=num_cores,
            name="w2_weight",
        )
    except ValueError as error:
        raise UnsupportedError(str(error)) from error
    return ExpertWeights(w13, w2, num_cores).to(experts.w1_weight.device)


def _rows(weight: Tensor) -> Tensor:
    """[experts, in, out] -> float8 [experts, out, in] on the CPU."""
    return finite_codes(weight.transpose(1, 2))


def finite_codes(weight: Tensor) -> Tensor:
    """Bytes of the fp8 format that ends at 240, as float8 on the CPU.

    Raises:
        UnsupportedError: one of them is no finite number.
    """
    codes = weight.detach().cpu().view(torch.uint8).contiguous()
    if (codes & 0x7F >= _FIRST_SPECIAL).any():
        raise UnsupportedError(
            "a weight holds fp8 codes above 240, which Trainium2 reads as infinity or NaN: it was "
            "not converted by vllm-neuron's loader"
        )
    return codes.view(torch.float8_e4m3fn)


def _fp32(scale: Tensor) -> Tensor:
    return scale.detach().cpu().to(torch.float32).contiguous()
