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
_SUM = "_moe_ep_sum"


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
        if not takes_kernel(self, hidden_states, is_prefill):
            return original(self, hidden_states, expert_affinities, expert_index, is_prefill)
        output = summed(self, routed_partial(self, hidden_states, expert_affinities))
        return output.to(hidden_states.dtype)

    return forward


def takes_kernel(experts: Any, hidden_states: Tensor, is_prefill: bool) -> bool:
    """Whether a call goes to the kernel."""
    return is_prepared(experts) and not is_prefill and hidden_states.shape[0] <= MAX_ROWS


def routed_partial(experts: Any, hidden_states: Tensor, affinities: Tensor) -> Tensor:
    """fp32 [rows, hidden_size]: this rank's experts, to be summed over the EP group."""
    weights: ExpertWeights = getattr(experts, _WEIGHTS)
    return weights(hidden_states, _local_weights(experts, affinities), float(experts.swiglu_limit))


def summed(experts: Any, values: Tensor) -> Tensor:
    """The sum over the EP group, in one collective or in two steps."""
    if experts.ep_group is None or experts.ep_degree == 1:
        return values
    all_reduce = getattr(experts, _SUM, None) or experts.ep_group.all_reduce
    total: Tensor = all_reduce(values)
    return total


def set_sum(experts: Any, all_reduce: Callable[[Tensor], Tensor]) -> None:
    """Sum over the EP group in another way than its own."""
    setattr(experts, _SUM, all_reduce)


def _local_weights(experts: Any, affinities: Tensor) -> Tensor:
    """fp32 [local experts, rows]. The rank is a tensor, so that all ranks trace one graph."""
    count = experts.num_local_experts
    places = torch.arange(count, device=affinities.device)
    ids = experts.ep_rank_buf.view(1).to(places.dtype) * count + places
    return affinities.to(torch.float32).index_select(1, ids).t().contiguous()
