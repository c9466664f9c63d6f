"""Build DeepSeek's MoE layers on our experts class when static-ep is chosen."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_moe_ep.adapters.vllm import engine_config
from vllm_moe_ep.adapters.vllm.wrapping import wrap_attribute


def hook_deepseek_factory() -> None:
    """Rebind the factory that `DeepseekV2MoE` calls; every model that shares the class follows."""
    from vllm.model_executor.models import deepseek_v2

    wrap_attribute(deepseek_v2, "FusedMoEFactory", _with_our_experts)


def hook_deepseek_v4_factory() -> None:
    """The same for DeepSeek-V4 on CPU, whose MoE class is its own."""
    from vllm.models.deepseek_v4.cpu import model

    wrap_attribute(model, "FusedMoEFactory", _with_our_experts)


def _with_our_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def FusedMoEFactory(**kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        if not engine_config.is_chosen(get_current_vllm_config()):
            return original(**kwargs)
        from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts

        kwargs["routed_experts_cls"] = StaticEPRoutedExperts
        kwargs["routed_experts_args"] = {
            **(kwargs.get("routed_experts_args") or {}),
            "refusal": refusal(kwargs),
        }
        return original(**kwargs)

    return FusedMoEFactory


def refusal(kwargs: dict[str, Any]) -> str | None:
    """Why the layer that these factory arguments describe cannot be ours; None if it can."""
    if kwargs.get("gate") is None:
        return "it has no gate"
    if kwargs.get("has_bias"):
        return "its experts have biases"
    if kwargs.get("activation", "silu") != "silu":
        return f"its activation is {kwargs['activation']}, not silu"
    if kwargs.get("apply_router_weight_on_input"):
        return "its routing weights apply to the experts' input"
    if kwargs.get("fuse_shared_experts"):
        return "its shared experts are fused into the routed ones"
    return None
