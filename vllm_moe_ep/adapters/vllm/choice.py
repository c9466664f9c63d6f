"""Whether static-ep is chosen. Asked by every hook, so it fails on no object of vLLM."""

import sys
from typing import Any

from vllm_moe_ep import BACKEND_NAME


def normalize(value: str) -> str:
    """Fold a backend name as vLLM does: lower case, dashes to underscores."""
    return value.strip().lower().replace("-", "_")


def is_ours(backend: Any) -> bool:
    """Whether a value of `moe_backend` means static-ep."""
    return isinstance(backend, str) and normalize(backend) == BACKEND_NAME


def backend_of(vllm_config: Any) -> Any:
    """The value of `moe_backend` in `vllm_config`; None if it has no such field."""
    return getattr(getattr(vllm_config, "kernel_config", None), "moe_backend", None)


def is_chosen(vllm_config: Any) -> bool:
    """Whether `vllm_config` asks for static-ep."""
    return is_ours(backend_of(vllm_config))


def is_current() -> bool:
    """Whether the configuration that vLLM builds a model under asks for static-ep.

    False also where this vLLM has no such function: that is a failed hook, which ends the start
    of an engine with static-ep.
    """
    module = sys.modules.get("vllm.config.vllm")
    current = getattr(module, "get_current_vllm_config_or_none", None)
    return current is not None and is_chosen(current())
