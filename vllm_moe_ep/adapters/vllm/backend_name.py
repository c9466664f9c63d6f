"""Make `static_ep` a value of vLLM's `moe_backend`, everywhere vLLM checks it."""

import argparse
import difflib
import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

from vllm_moe_ep import BACKEND_NAME
from vllm_moe_ep.adapters.vllm import failed_hooks
from vllm_moe_ep.adapters.vllm.choice import is_ours, normalize
from vllm_moe_ep.adapters.vllm.wrapping import MissingAttributeError

_HELP = (
    '- "static_ep": vllm-moe-ep\'s expert-parallel layer for DeepSeek-style models\n'
    "  (settings: `vllm-moe-ep env`)"
)


def known_backends() -> tuple[str, ...]:
    """All values of `moe_backend`, ours included; none where this vLLM keeps them elsewhere."""
    kernel = sys.modules.get("vllm.config.kernel")
    fields = getattr(getattr(kernel, "KernelConfig", None), "__dataclass_fields__", {})
    return get_args(getattr(fields.get("moe_backend"), "type", None))


def near_matches(value: str) -> list[str]:
    """Known backends spelled like `value`."""
    return difflib.get_close_matches(normalize(value), known_backends(), n=3, cutoff=0.6)


def unknown_backend_message(value: str) -> str:
    """The error text for a backend nobody knows."""
    near = near_matches(value)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"MoE backend {value!r} is unknown: {hint}known are {', '.join(known_backends())}"


def widen_kernel_config(config_class: Any) -> None:
    """Add our name to the Literal of `KernelConfig.moe_backend`."""
    names = get_args(_field_of(config_class).type)
    if BACKEND_NAME not in names:
        wider = Literal[(*names, BACKEND_NAME)]  # type: ignore[valid-type]
        _change_type(config_class, wider)


def widen_speculative_config(config_class: Any) -> None:
    """The same for `SpeculativeConfig.moe_backend`, which may also be None."""
    from vllm.config.kernel import KernelConfig

    _change_type(config_class, _field_of(KernelConfig).type | None)


def _field_of(config_class: Any) -> Any:
    fields = config_class.__dataclass_fields__
    if "moe_backend" not in fields or "moe_backend" not in config_class.__annotations__:
        raise MissingAttributeError("it is no field there")
    return fields["moe_backend"]


def _change_type(config_class: Any, field_type: Any) -> None:
    """vLLM has no public way to add a value; if this one fails, everything is as it was.

    The classes are pydantic dataclasses, so their validators are rebuilt, and that of
    `VllmConfig`, which embeds them.
    """
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config.vllm import VllmConfig

    original = _field_of(config_class).type
    if field_type == original:
        return
    _set_type(config_class, field_type)
    try:
        rebuild_dataclass(config_class, force=True)
        rebuild_dataclass(VllmConfig, force=True)  # type: ignore[arg-type]
    except Exception:
        _set_type(config_class, original)
        rebuild_dataclass(config_class, force=True)
        rebuild_dataclass(VllmConfig, force=True)  # type: ignore[arg-type]
        raise


def _set_type(config_class: Any, field_type: Any) -> None:
    config_class.__dataclass_fields__["moe_backend"].type = field_type
    config_class.__annotations__["moe_backend"] = field_type


def forget_cached_arguments(arg_utils: Any) -> None:
    """The arguments of each config class are cached, perhaps from before they were widened."""
    if hasattr(arg_utils._compute_kwargs, "cache_clear"):
        arg_utils._compute_kwargs.cache_clear()


def with_near_matches(original: Callable[..., Any]) -> Callable[..., Any]:
    """Offer our name on the command line, and near matches for a name nobody knows."""

    @functools.wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        for action in getattr(parser, "_actions", ()):
            if "--moe-backend" in action.option_strings:
                action.type = _parser_of_backends(action.type)
                action.help = f"{action.help}\n{_HELP}"
        return parser

    return add_cli_args


def _parser_of_backends(inner: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        if is_ours(text):
            if failed_hooks.all_failed():
                raise argparse.ArgumentTypeError(failed_hooks.message())
            return BACKEND_NAME
        known = known_backends()
        if known and normalize(text) not in known:
            raise argparse.ArgumentTypeError(unknown_backend_message(text))
        return text if inner is None else inner(text)

    return parse
