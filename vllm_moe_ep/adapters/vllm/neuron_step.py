"""Join the sums of vllm-neuron's MoE steps into one, once a model is built and loaded."""

import logging
from types import ModuleType

from torch import nn

from vllm_moe_ep.adapters.neuron.ep_sum import two_step_sum
from vllm_moe_ep.adapters.neuron.moe_step import prepare_shared_slice, swap_step, swapped_steps
from vllm_moe_ep.adapters.neuron.routed_experts import is_prepared, set_sum, swapped_modules
from vllm_moe_ep.device_groups import device_size_of
from vllm_moe_ep.envs import Settings
from vllm_moe_ep.errors import UnsupportedError

logger = logging.getLogger("vllm.vllm_moe_ep")


def take_steps(model: nn.Module, moe: ModuleType, settings: Settings) -> None:
    """Swap the MoE class of vllm-neuron's module `moe`, and make the groups of the sum."""
    reason = swap_step(moe)
    if reason is not None:
        logger.info("static-ep: the shared experts stay vllm-neuron's own: %s", reason)
    layers = list(swapped_modules(model).values())
    group = next((layer.ep_group for layer in layers if layer.ep_group is not None), None)
    if group is None:
        return
    size = device_size_of("neuron", settings.device_size)
    total = two_step_sum(group, size, settings.hierarchical_all_reduce)
    if isinstance(total, str):
        logger.info("static-ep: the sum over EP ranks is one collective: %s", total)
        return
    for layer in layers:
        set_sum(layer, total)


def prepare_steps(model: nn.Module, settings: Settings) -> None:
    """Lay out this rank's slices of the shared experts; to be called whenever weights were loaded.

    Raises:
        UnsupportedError: a layer's shared expert holds no finite numbers; names it.
    """
    if not settings.shared_slices:
        return
    reasons: dict[str, str] = {}
    for name, moe in swapped_steps(model).items():
        if not is_prepared(moe.get_submodule("experts")):
            continue
        try:
            reason = prepare_shared_slice(moe)
        except UnsupportedError as error:
            raise UnsupportedError(f"The shared expert of layer {name}: {error}") from error
        if reason is not None:
            reasons.setdefault(reason, name)
    for reason, name in reasons.items():
        logger.info("static-ep: the shared expert of %s stays vllm-neuron's own: %s", name, reason)
