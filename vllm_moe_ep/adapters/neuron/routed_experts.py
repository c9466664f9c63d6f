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

from vllm_moe_ep.adapters.neuron.expert_weights import ExpertWeights, prepared
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.nki.experts import MAX_ROWS

CLASS_NAME = "DeepseekV4RoutedExperts"
_FORWARD = ["self", "hidden_states", "expert_affinities", "expert_index", "is_prefill"]
_WEIGHTS = "moe_ep_weights"
_SWAPPED = "_moe_ep_swapped"


def swap_routed_experts(module: ModuleType) -> None:
    """Wrap the class's forward: decode steps take the kernel, all others the original.

    Call it once ``vllm_neuron.model.deepseek_v4.moe`` is imported, and ``prepare_experts`` for
    each module whose weights are loaded; until then a module runs as before. A second call changes
    nothing.

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


def swapped_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The routed-experts modules whose class was wrapped, by their names in the model."""
    return {
        name: part for name, part in model.named_modules() if getattr(type(part), _SWAPPED, False)
    }


def prepare_experts(experts: nn.Module) -> ExpertWeights:
    """Lay out a module's loaded weights: from then on its decode steps take the kernel.

    To be called again whenever weights were loaded: the kernels read what was laid out last.

    Raises:
        UnsupportedError: a size has no kernel, or a weight holds no finite fp8 number.
    """
    weights = prepared(experts)
    present: ExpertWeights | None = getattr(experts, _WEIGHTS, None)
    if present is None:
        setattr(experts, _WEIGHTS, weights)
        return weights
    present.overwrite(weights)
    return present


def is_prepared(experts: nn.Module) -> bool:
    """Whether a module's decode steps take the kernel."""
    return hasattr(experts, _WEIGHTS)


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
