"""Make `static_ep` a value of vLLM's `moe_backend`, everywhere vLLM checks it."""

import argparse
import difflib
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from vllm_moe_ep import BACKEND_NAME
from vllm_moe_ep.adapters.vllm.wrapping import wrap_attribute

_HELP = (
    '- "static_ep": vllm-moe-ep\'s expert-parallel layer for DeepSeek-style models\n'
    "  (settings: `vllm-moe-ep env`)"
)


def normalize(value: str) -> str:
    """Fold a backend name as vLLM does: lower case, dashes to underscores."""
    return value.strip().lower().replace("-", "_")


def known_backends() -> tuple[str, ...]:
    """All values of `moe_backend`, ours included."""
    from vllm.config.kernel import KernelConfig

    return get_args(KernelConfig.__dataclass_fields__["moe_backend"].type)


def near_matches(value: str) -> list[str]:
    """Known backends spelled like `value`."""
    return difflib.get_close_matches(normalize(value), known_backends(), n=3, cutoff=0.6)


def unknown_backend_message(value: str) -> str:
    """The error text for a backend nobody knows."""
    near = near_matches(value)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"MoE backend {value!r} is unknown: {hint}known are {', '.join(known_backends())}"


def widen_config_types() -> None:
    """Add our name to the Literal of `KernelConfig` and `SpeculativeConfig`.

    vLLM has no public way to add a value. Both classes are pydantic dataclasses, so their
    validators are rebuilt, and that of `VllmConfig`, which embeds them.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.kernel import KernelConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.config.vllm import VllmConfig

    if BACKEND_NAME in known_backends():
        return
    names = (*known_backends(), BACKEND_NAME)
    wider = Literal[names]  # type: ignore[valid-type]
    _set_field_type(KernelConfig, wider)
    _set_field_type(SpeculativeConfig, wider | None)
    for config_class in (KernelConfig, SpeculativeConfig, VllmConfig):
        rebuild_dataclass(config_class, force=True)  # type: ignore[arg-type]


def _set_field_type(config_class: Any, field_type: Any) -> None:
    config_class.__dataclass_fields__["moe_backend"].type = field_type
    config_class.__annotations__["moe_backend"] = field_type


def hook_arguments() -> None:
    """Offer our name on the command line, and near matches for a name nobody knows."""
    from vllm.engine import arg_utils

    # The keyword arguments of each config class are cached, perhaps from before the widening.
    arg_utils._compute_kwargs.cache_clear()
    wrap_attribute(arg_utils.EngineArgs, "add_cli_args", _with_near_matches)


def _with_near_matches(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        result = original(parser)
        for action in parser._actions:
            if "--moe-backend" in action.option_strings:
                action.type = _parse_backend
                action.help = f"{action.help}\n{_HELP}"
        return result

    return add_cli_args


def _parse_backend(text: str) -> str:
    name = normalize(text)
    if name not in known_backends():
        raise argparse.ArgumentTypeError(unknown_backend_message(text))
    return name
