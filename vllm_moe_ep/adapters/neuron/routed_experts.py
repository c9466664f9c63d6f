"""Decode steps of vllm-neuron's routed experts through the gated expert kernel.

Written against the public sources of ``vllm_neuron.model.deepseek_v4.moe``: its class
``DeepseekV4RoutedExperts`` keeps weights [experts, in, out] as bytes of the fp8 format that ends
at 240, with an fp32 scale per output channel, and is called with replicated tokens.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.nki.experts import MAX_ROWS
from vllm_moe_ep_kernels.nki.linears import NkiLinears
from vllm_moe_ep_kernels.nki.ops import nki_gated_experts
from vllm_moe_ep_kernels.nki.prepare import BLOCK, PreparedWeight

CLASS_NAME = "DeepseekV4RoutedExperts"
_FORWARD = ["self", "hidden_states", "expert_affinities", "expert_index", "is_prefill"]
_WEIGHTS = "moe_ep_weights"
_SWAPPED = "_moe_ep_swapped"
# The first code that this fp8 format reads as infinity or NaN.
_FIRST_SPECIAL = 0x78


class ExpertWeights(nn.Module):
    """One rank's experts in the kernels' layout, as buffers that follow the model's device."""

    def __init__(self, w13: PreparedWeight, w2: PreparedWeight, num_cores: int) -> None:
        super().__init__()
        self.num_cores = num_cores
        for name, weight in (("w13", w13), ("w2", w2)):
            for part in ("codes", "scales"):
                tensor = torch.from_numpy(getattr(weight, part))
                self.register_buffer(f"{name}_{part}", tensor, persistent=False)

    def forward(self, rows: Tensor, row_weight: Tensor, swiglu_limit: float) -> Tensor:
        """fp32 [rows, hidden_size]; an expert whose row_weight [experts, rows] is 0 is not read."""
        flags = (row_weight != 0).any(dim=1).to(torch.int32)[None]
        weights = (self.w13_codes, self.w13_scales, self.w2_codes, self.w2_scales)
        static = (False, max(swiglu_limit, 0.0), self.num_cores)
        return nki_gated_experts(rows, *weights, row_weight, flags, *static)


def swap_routed_experts(module: ModuleType) -> None:
    """Wrap the class's forward: decode steps take the kernel, all others the original.

    Call it once ``vllm_neuron.model.deepseek_v4.moe`` is imported, and ``prepare_model`` after
    the weights are loaded. A second call changes nothing.

    Raises:
        UnsupportedError: the class is missing, or its forward takes other arguments.
    """
    experts = getattr(module, CLASS_NAME, None)
    if experts is None:
        raise UnsupportedError(f"{module.__name__} has no class {CLASS_NAME}: another version?")
    if getattr(experts, _SWAPPED, False):
        return
    found = list(inspect.signature(experts.forward).parameters)
    if found != _FORWARD:
        raise UnsupportedError(
            f"{CLASS_NAME}.forward takes {', '.join(found)}; this adapter knows "
            f"{', '.join(_FORWARD)}."
        )
    experts.forward = _wrapped(experts.forward)
    setattr(experts, _SWAPPED, True)


def prepare_model(model: nn.Module, num_cores: int = 2) -> int:
    """Lay out the weights of every routed-experts module, once they are loaded on the CPU.

    Returns:
        how many modules were prepared.

    Raises:
        UnsupportedError: a size has no kernel, or a weight holds no finite fp8 number.
    """
    found = [part for part in model.modules() if getattr(type(part), _SWAPPED, False)]
    for part in found:
        setattr(part, _WEIGHTS, _prepared(part, num_cores))
    return len(found)


def _wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        is_prefill: bool,
    ) -> Tensor:
        weights = getattr(self, _WEIGHTS, None)
        if weights is None or is_prefill or hidden_states.shape[0] > MAX_ROWS:
            return original(self, hidden_states, expert_affinities, expert_index, is_prefill)
        row_weight = _local_weights(self, expert_affinities)
        output = weights(hidden_states, row_weight, float(self.swiglu_limit))
        if self.ep_group is not None and self.ep_degree > 1:
            output = self.ep_group.all_reduce(output)
        return output.to(hidden_states.dtype)

    return forward


def _local_weights(experts: Any, affinities: Tensor) -> Tensor:
    """fp32 [local experts, rows]. The rank is a tensor, so that all ranks trace one graph."""
    count = experts.num_local_experts
    places = torch.arange(count, device=affinities.device)
    ids = experts.ep_rank_buf.view(1).to(places.dtype) * count + places
    return affinities.to(torch.float32).index_select(1, ids).t().contiguous()


def _prepared(experts: Any, num_cores: int) -> ExpertWeights:
    gate_up = torch.cat([_rows(experts.w1_weight), _rows(experts.w3_weight)], dim=1)
    gate_up_scale = torch.cat([experts.w1_scale, experts.w3_scale], dim=1)
    linears = NkiLinears(num_cores)
    try:
        w13 = linears.lay_out(
            gate_up, _per_block(gate_up_scale, gate_up), (1, BLOCK), is_interleaved=True
        )
        down = _rows(experts.w2_weight)
        w2 = linears.lay_out(
            down, _per_block(experts.w2_scale, down), (1, BLOCK), k_parts=num_cores
        )
    except ValueError as error:
        raise UnsupportedError(f"{CLASS_NAME}: {error}") from error
    return ExpertWeights(w13, w2, num_cores)


def _rows(weight: Tensor) -> Tensor:
    """[experts, in, out] -> float8 [experts, out, in]."""
    codes = weight.detach().view(torch.uint8).transpose(1, 2).contiguous()
    if (codes & 0x7F >= _FIRST_SPECIAL).any():
        raise UnsupportedError(
            f"{CLASS_NAME}: a weight holds fp8 codes above 240, which Trainium2 reads as infinity "
            "or NaN: it was not converted by vllm-neuron's loader."
        )
    return codes.view(torch.float8_e4m3fn)


def _per_block(scale: Tensor, rows: Tensor) -> Tensor:
    """A channel's scale, once for each 128 columns."""
    num_blocks = rows.shape[2] // BLOCK
    return scale.detach().to(torch.float32)[:, :, None].expand(-1, -1, num_blocks).contiguous()
