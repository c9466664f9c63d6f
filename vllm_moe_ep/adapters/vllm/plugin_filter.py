"""Say so when `VLLM_PLUGINS` filters this plugin out although static-ep is asked for.

vLLM runs no code of a plugin that its filter leaves out, so its command line would only answer
"invalid choice". torch, which every vLLM process imports first, calls `check` through the entry
point group `torch.backends`. Unless the filter leaves us out, it does nothing.
"""

import argparse
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm_moe_ep import BACKEND_NAME, PLUGIN_NAME
from vllm_moe_ep.adapters.vllm.backend_name import normalize
from vllm_moe_ep.adapters.vllm.import_hooks import when_imported
from vllm_moe_ep.adapters.vllm.wrapping import wrap_attribute


def check() -> None:
    """Arrange for a clear refusal in this process if the filter leaves the plugin out."""
    if filter_message(os.environ) is None:
        return
    when_imported("vllm.engine.arg_utils", _hook_arguments)
    when_imported("vllm.config.vllm", _hook_config)


def filter_message(environ: Mapping[str, str]) -> str | None:
    """What to tell who asks for static-ep under this environment; None if the plugin loads."""
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in allowed.split(","):
        return None
    return (
        f"moe_backend static-ep was asked for, but VLLM_PLUGINS={allowed!r} leaves its plugin "
        f"out: add {PLUGIN_NAME} to the list, or unset VLLM_PLUGINS"
    )


def _is_ours(backend: Any) -> bool:
    return isinstance(backend, str) and normalize(backend) == BACKEND_NAME


def _hook_arguments(arg_utils: Any) -> None:
    wrap_attribute(arg_utils.EngineArgs, "add_cli_args", _refusing_parser)


def _refusing_parser(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        result = original(parser)
        for action in parser._actions:
            if "--moe-backend" in action.option_strings:
                action.type = _refusing_type(action.type)
        return result

    return add_cli_args


def _refusing_type(inner: Any) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        message = filter_message(os.environ)
        if message is not None and _is_ours(text):
            raise argparse.ArgumentTypeError(message)
        return inner(text)

    return parse


def _hook_config(module: Any) -> None:
    wrap_attribute(module.VllmConfig, "__post_init__", _refusing_config)


def _refusing_config(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        message = filter_message(os.environ)
        if message is not None and _is_ours(self.kernel_config.moe_backend):
            raise ValueError(f"{message}.")
        original(self, *args, **kwargs)

    return __post_init__
