"""A decode step of vllm-neuron's MoE with one sum over all EP ranks, shared expert included.

Written against the public sources of ``vllm_neuron.model.deepseek_v4.moe``: ``DeepseekV4MoE`` adds
the output of its ``experts``, summed over the EP group, and that of its ``shared_expert``, summed
over a group of its own.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from vllm_moe_ep.adapters.neuron.routed_experts import routed_partial, summed, takes_kernel
from vllm_moe_ep.adapters.neuron.shared_slice import SharedSlice, prepared_slice, why_not_sliced

CLASS_NAME = "DeepseekV4MoE"
_FORWARD = ["self", "hidden_states", "input_ids", "is_prefill"]
_SHARED = "moe_ep_shared_slice"
_SWAPPED = "_moe_ep_step_swapped"


def swap_step(module: ModuleType) -> str | None:
    """Wrap the class's forward; a second call changes nothing. Why it is left alone, or None."""
    moe = getattr(module, CLASS_NAME, None)
    if moe is None or not hasattr(moe, "_route"):
        return f"{module.__name__} has no class {CLASS_NAME} with a router _route"
    if getattr(moe, _SWAPPED, False):
        return None
    found = list(inspect.signature(moe.forward).parameters)
    if found != _FORWARD:
        return f"{CLASS_NAME}.forward takes {', '.join(found)}, not {', '.join(_FORWARD)}"
    moe.forward = _wrapped(moe.forward)
    setattr(moe, _SWAPPED, True)
    return None


def swapped_steps(model: nn.Module) -> dict[str, nn.Module]:
    """The MoE modules whose class was wrapped, by their names in the model."""
    return {
        name: part for name, part in model.named_modules() if getattr(type(part), _SWAPPED, False)
    }


def prepare_shared_slice(moe: Any) -> str | None:
    """Take a module's shared expert into the one sum, once its weights are loaded, and after that
    whenever they are loaded again. Why it stays vllm-neuron's own, or None.

    Raises:
        UnsupportedError: a weight or scale holds no finite number.
    """
    reason = why_not_sliced(moe.shared_expert, moe.experts.ep_degree)
    if reason is not None:
        return reason
    part = prepared_slice(moe.shared_expert, moe.experts.ep_degree)
    present: SharedSlice | None = getattr(moe, _SHARED, None)
    if present is None:
        setattr(moe, _SHARED, part)
    else:
        present.overwrite(part)
    return None


def _wrapped(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor, input_ids: Tensor, is_prefill: bool) -> Tensor:
        if not takes_kernel(self.experts, hidden_states, is_prefill):
            return original(self, hidden_states, input_ids, is_prefill)
        affinities, _ = self._route(hidden_states, input_ids)
        values = routed_partial(self.experts, hidden_states, affinities)
        shared: SharedSlice | None = getattr(self, _SHARED, None)
        if shared is not None:
            values = values + shared(hidden_states)
        values = summed(self.experts, values)
        if shared is None:
            values = values + self.shared_expert(hidden_states)
        return values.to(hidden_states.dtype)

    return forward
