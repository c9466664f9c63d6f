"""Close gaps before a model is built; say after it how many of its MoE layers are ours."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_moe_ep.adapters.vllm import engine_config, failed_hooks
from vllm_moe_ep.adapters.vllm.choice import is_chosen
from vllm_moe_ep.adapters.vllm.needed_cures import prepare_for
from vllm_moe_ep.adapters.vllm.settings_report import LayerFacts, idle_settings
from vllm_moe_ep.adapters.vllm.wrapping import argument
from vllm_moe_ep.envs import Settings
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.hardware import probe, require_layer

logger = logging.getLogger("vllm.vllm_moe_ep")


def with_report(original: Callable[..., Any]) -> Callable[..., Any]:
    """Prepare for each model, and check it once vLLM has built it, before its weights are read."""

    @functools.wraps(original)
    def create_model(*args: Any, **kwargs: Any) -> Any:
        vllm_config = argument(original, "vllm_config", args, kwargs)
        if not is_chosen(vllm_config):
            return original(*args, **kwargs)
        failed_hooks.refuse_if_any()
        model_config = argument(original, "model_config", args, kwargs)
        prepare_for(vllm_config, model_config)
        model = original(*args, **kwargs)
        # Building it imported more of vLLM.
        failed_hooks.refuse_if_any()
        report(model, vllm_config, engine_config.is_draft(vllm_config, model_config))
        return model

    return create_model


def report(model: Any, vllm_config: Any, is_draft: bool) -> None:
    """Log "replaced N of M"; list the layers left on vLLM's own.

    Raises:
        UnsupportedError: the model has no MoE layer that we replaced and none was allowed to
            stay stock; a draft model may have none.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts

    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    ours = [
        layer
        for layer in layers
        if isinstance(layer, StaticEPRoutedExperts) and layer.refusal is None
    ]
    stock = [layer.layer_name for layer in layers if layer not in ours]
    settings = engine_config.settings_of(vllm_config)
    if not (ours or is_draft or (stock and settings.allow_stock)):
        raise UnsupportedError(
            f"--moe-backend static-ep found no DeepSeek MoE layer in {type(model).__name__}: "
            "choose another --moe-backend for this model."
        )
    hardware = probe(settings.platform)
    engine_config.log_choice(hardware)
    logger.info(
        "static-ep: replaced %d of %d DeepSeek MoE layers with %s%s",
        len(ours),
        len(layers),
        require_layer(hardware),
        f"; {ours[0].groups_summary}" if ours else "",
    )
    if stock:
        logger.warning("static-ep: left on vLLM's own layer as allowed: %s", ", ".join(stock))
    if ours:
        facts = _facts(ours[0], settings, len(stock))
        for sentence in idle_settings(engine_config.given_settings(vllm_config), facts):
            logger.warning("static-ep: %s", sentence)


def _facts(layer: Any, settings: Settings, num_stock: int) -> LayerFacts:
    from vllm.distributed import get_dp_group, get_tp_group

    from vllm_moe_ep.adapters.vllm.groups import why_sum_is_flat

    return LayerFacts(
        platform=probe(settings.platform).kind,
        experts=settings.experts,
        token_size=get_dp_group().world_size,
        replica_size=get_tp_group().world_size,
        has_shared=layer.has_shared,
        why_flat=why_sum_is_flat(),
        is_hierarchical=settings.hierarchical_all_reduce,
        num_stock=num_stock,
    )
