"""Build DeepSeek's MoE layers on our runner and experts classes when static-ep is chosen."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_moe_ep.adapters.vllm import choice, engine_config


def with_whole_shared(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep shared experts whole on each rank where `VLLM_MOE_EP_SHARED_SLICES` is off.

    The argument is vLLM's own: weights are not split, and no collective follows.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_shared = str(kwargs.get("prefix", "")).endswith(".shared_experts")
        if is_shared and _keeps_shared_whole():
            kwargs["is_sequence_parallel"] = True
        return original(self, *args, **kwargs)

    return __init__


def _keeps_shared_whole() -> bool:
    from vllm.config import get_current_vllm_config

    if not choice.is_current():
        return False
    return not engine_config.settings_of(get_current_vllm_config()).shared_slices


def with_our_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def FusedMoEFactory(*args: Any, **kwargs: Any) -> Any:
        if not choice.is_current():
            return original(*args, **kwargs)
        from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts
        from vllm_moe_ep.adapters.vllm.runner import StaticEPRunner

        kwargs["runner_cls"] = StaticEPRunner
        kwargs["routed_experts_cls"] = StaticEPRoutedExperts
        kwargs["routed_experts_args"] = {
            **(kwargs.get("routed_experts_args") or {}),
            "refusal": refusal(kwargs),
        }
        return original(*args, **kwargs)

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
    if kwargs.get("shared_expert_gate") is not None:
        return "its shared expert has a gate of its own"
    if kwargs.get("routed_input_transform") or kwargs.get("routed_output_transform"):
        return "its experts work in a latent space of their own"
    if kwargs.get("zero_expert_type") is not None:
        return "some of its experts are of zero size"
    if kwargs.get("is_sequence_parallel"):
        return "its tokens are split over tensor-parallel ranks"
    if not kwargs.get("reduce_results", True) and _keeps_shared_whole():
        return "its model sums over ranks by itself, which needs VLLM_MOE_EP_SHARED_SLICES=1"
    return None
