"""Put our experts into vllm-neuron's models while its runner loads them with static-ep chosen.

vllm-neuron builds and loads models by itself, so none of vLLM's hooks is reached. Written against
its public sources: `NeuronModelRunner.load_model` calls the model class's `from_configs` (on the
meta device) and then `load_weights`.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import nn

from vllm_moe_ep.adapters.neuron.expert_weights import refusal
from vllm_moe_ep.adapters.neuron.routed_experts import (
    CLASS_NAME,
    is_prepared,
    prepare_experts,
    swap_routed_experts,
    swapped_modules,
)
from vllm_moe_ep.adapters.vllm import choice, engine_config, failed_hooks, neuron_config
from vllm_moe_ep.adapters.vllm.neuron_step import prepare_steps, take_steps
from vllm_moe_ep.envs import Settings
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.hardware import NEURON_LAYER, probe

logger = logging.getLogger("vllm.vllm_moe_ep")

MOE_MODULE = "vllm_neuron.model.deepseek_v4.moe"
_STOCK = "_moe_ep_stays_stock"
# On a model that was built with static-ep chosen: its settings.
_MODEL_SETTINGS = "_moe_ep_settings"
_settings: ContextVar[Settings | None] = ContextVar("_settings", default=None)
"""While a runner loads a model with static-ep chosen: the settings. Else None."""


def with_our_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Follow `NeuronModelRunner.load_model`, which has the configuration."""

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not choice.is_chosen(getattr(self, "vllm_config", None)):
            return original(self, *args, **kwargs)
        failed_hooks.refuse_if_any()
        settings = engine_config.settings_of(self.vllm_config)
        hardware = probe(settings.platform)
        if hardware.kind != "neuron":
            raise UnsupportedError(
                f"vllm-neuron serves this model, but static-ep found {hardware.device_name} "
                f"({hardware.reason}): set VLLM_MOE_EP_PLATFORM=neuron."
            )
        token = _settings.set(settings)
        try:
            result = original(self, *args, **kwargs)
        finally:
            _settings.reset(token)
        _check_outcome(self.model, settings.allow_stock)
        return result

    return load_model


def taking_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Take the experts once the model is built."""

    @functools.wraps(original)
    def from_configs(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        settings = _settings.get()
        if settings is not None:
            setattr(model, _MODEL_SETTINGS, settings)
            moe = importlib.import_module(MOE_MODULE)
            take_layers(model, moe, settings.allow_stock)
            take_steps(model, moe, settings)
        return model

    return from_configs


def preparing_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lay out the weights of the experts that were taken, once they are loaded."""

    @functools.wraps(original)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # Of the model, not of the runner: weights may be loaded again, long after load_model.
        settings: Settings | None = getattr(self, _MODEL_SETTINGS, None)
        if settings is not None:
            prepare_layers(self, settings.allow_stock)
            prepare_steps(self, settings)
        return result

    return load_weights


def take_layers(model: nn.Module, moe: ModuleType, allow_stock: bool) -> None:
    """Swap the experts class of vllm-neuron's module `moe`; check each layer by its shape.

    Raises:
        UnsupportedError: a layer cannot be taken and must not stay stock; names it.
    """
    try:
        swap_routed_experts(moe)
    except UnsupportedError as error:
        named = [name for name, part in model.named_modules() if type(part).__name__ == CLASS_NAME]
        _leave_stock(", ".join(named) or MOE_MODULE, str(error).rstrip("."), allow_stock)
        return
    for name, layer in swapped_modules(model).items():
        reason = refusal(layer)
        if reason is not None:
            _leave_stock(name, reason, allow_stock)
            setattr(layer, _STOCK, True)


def prepare_layers(model: nn.Module, allow_stock: bool) -> None:
    """Lay out the loaded weights of every layer taken, and log how many are ours.

    Called again, it brings the weights loaded since then to the kernels.

    Raises:
        UnsupportedError: a layer's weights cannot be taken and must not stay stock, or it was ours
            until now: a compiled graph cannot go back to stock experts; names it.
    """
    layers = swapped_modules(model)
    num_inexact = 0
    for name, layer in layers.items():
        if getattr(layer, _STOCK, False):
            continue
        try:
            num_inexact += prepare_experts(layer).num_inexact
        except UnsupportedError as error:
            reason = str(error).rstrip(".")
            if is_prepared(layer):
                raise UnsupportedError(
                    f"Loading weights again failed for layer {name}: {reason}. Its kernels still "
                    "hold the weights from before, so the model is a mixture of both: start the "
                    "server anew, or load weights that it can take."
                ) from error
            _leave_stock(name, reason, allow_stock)
            setattr(layer, _STOCK, True)
    logger.info(
        "static-ep: replaced %d of %d DeepSeek MoE layers with %s; %d weights were not kept "
        "exactly",
        sum(map(is_prepared, layers.values())),
        len(layers),
        NEURON_LAYER,
        num_inexact,
    )


def _leave_stock(layer: str, reason: str, allow_stock: bool) -> None:
    if not allow_stock:
        raise neuron_config.refuse(layer, reason)
    logger.warning("static-ep: left on vllm-neuron's own as allowed: %s: %s", layer, reason)


def _check_outcome(model: nn.Module, allow_stock: bool) -> None:
    """That the hooks were reached at all: another version may build its models elsewhere.

    Raises:
        UnsupportedError: no layer is ours, and none was allowed to stay stock.
    """
    if allow_stock or any(map(is_prepared, swapped_modules(model).values())):
        return
    raise UnsupportedError(
        f"--moe-backend static-ep replaced no layer of {type(model).__name__}: vllm-neuron did not "
        f"load weights through {neuron_config.ARCHITECTURE} (another version, or "
        "VLLM_NEURON_CPU_COMPILE is set). Choose another --moe-backend."
    )
