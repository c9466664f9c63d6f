"""DeepSeek-V4 on CPU: its metadata builder leaves out entries that vLLM then reads.

vLLM's shared builder reads one schedule per layer type from `build_tile_scheduler`. The CPU's
version, which schedules nothing, names three of the types and misses the two of DeepSeek-V4.1.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm_moe_ep.adapters.vllm import choice, cures
from vllm_moe_ep.adapters.vllm.wrapping import MARK


def with_all_types(original: Callable[..., Any]) -> Callable[..., Any]:
    """Complete the dictionary where the cure is on."""

    @functools.wraps(original)
    def build_tile_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedules = original(self, *args, **kwargs)
        if cures.is_active(CURE) and choice.is_chosen(getattr(self, "vllm_config", None)):
            schedules = dict.fromkeys(_layer_types()) | schedules
        return schedules

    return build_tile_scheduler


def _layer_types() -> list[str]:
    """Keys of all layer types, as vLLM's shared builder spells them."""
    from vllm.v1.attention.backends.mla import sparse_swa

    return [value for name, value in vars(sparse_swa).items() if name.startswith("_LAYER_TYPE_")]


def is_needed() -> bool:
    """Whether entries are missing in this vLLM."""
    return not set(_layer_types()) <= _stock_schedules().keys()


def _stock_schedules() -> dict[str, Any]:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    wrapper = DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler
    schedules: dict[str, Any] = getattr(wrapper, MARK)(None, 0)
    return schedules


def _failure() -> str | None:
    """The entries that are there must be empty: then so may be those that are missing."""
    full = [key for key, schedule in _stock_schedules().items() if schedule is not None]
    return f"vLLM now schedules {', '.join(full)} on the CPU" if full else None


CURE = cures.Cure(
    name="DeepSeek-V4 schedules",
    gap="vLLM's attention metadata for DeepSeek-V4 on CPU misses the entries c1a and c2a",
    remedy="Serve another model, or a version of vLLM in which its own CPU path works.",
    failure=_failure,
)
