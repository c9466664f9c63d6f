"""No MoE layer runs on vLLM's own experts unnoticed while static-ep is chosen."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_moe_ep.adapters.vllm import choice, engine_config
from vllm_moe_ep.adapters.vllm.wrapping import argument
from vllm_moe_ep.errors import UnsupportedError


def with_guard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check each `RoutedExperts` of vLLM before it chooses a kernel."""

    @functools.wraps(original)
    def _get_quant_method(*args: Any, **kwargs: Any) -> Any:
        moe_config = argument(original, "moe_config", args, kwargs)
        if choice.is_ours(getattr(moe_config, "moe_backend", None)):
            prefix = argument(original, "prefix", args, kwargs)
            allow_stock(prefix, "its class is not DeepSeek's MoE layer", moe_config)
        return original(*args, **kwargs)

    return _get_quant_method


def allow_stock(prefix: str, reason: str, moe_config: Any) -> None:
    """Hand one layer to vLLM's automatic choice, if the user allowed that.

    Raises:
        UnsupportedError: `VLLM_MOE_EP_ALLOW_STOCK` is off; names the layer and the reason.
    """
    from vllm.config import get_current_vllm_config

    if not engine_config.settings_of(get_current_vllm_config()).allow_stock:
        raise UnsupportedError(
            f"--moe-backend static-ep cannot take layer {prefix}: {reason}. Choose another "
            "--moe-backend, or set VLLM_MOE_EP_ALLOW_STOCK=1 to leave such layers on vLLM's own."
        )
    moe_config.moe_backend = "auto"
