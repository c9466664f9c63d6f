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

from vllm_moe_ep import PLUGIN_NAME
from vllm_moe_ep.adapters.vllm.choice import backend_of, is_ours
from vllm_moe_ep.adapters.vllm.hooks import Hook, install

HOOKS = (
    Hook(
        "vllm.engine.arg_utils",
        "vllm.engine.arg_utils.EngineArgs.add_cli_args",
        "plugin_filter.refusing_parser",
    ),
    Hook(
        "vllm.config.vllm",
        "vllm.config.vllm.VllmConfig.__post_init__",
        "plugin_filter.refusing_config",
    ),
)


def check() -> None:
    """Arrange for a clear refusal in this process if the filter leaves the plugin out."""
    if filter_message(os.environ) is None:
        return
    install(HOOKS)


def filter_message(environ: Mapping[str, str]) -> str | None:
    """What to tell who asks for static-ep under this environment; None if the plugin loads."""
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None or PLUGIN_NAME in allowed.split(","):
        return None
    return (
        f"moe_backend static-ep was asked for, but VLLM_PLUGINS={allowed!r} leaves its plugin "
        f"out: add {PLUGIN_NAME} to the list, or unset VLLM_PLUGINS"
    )


def refusing_parser(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse our name on the command line, before argparse calls it an invalid choice."""

    @functools.wraps(original)
    def add_cli_args(*args: Any, **kwargs: Any) -> Any:
        parser = original(*args, **kwargs)
        for action in getattr(parser, "_actions", ()):
            if "--moe-backend" in action.option_strings:
                action.type = _refusing_type(action.type)
        return parser

    return add_cli_args


def _refusing_type(inner: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        message = filter_message(os.environ)
        if message is not None and is_ours(text):
            raise argparse.ArgumentTypeError(message)
        return text if inner is None else inner(text)

    return parse


def refusing_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse our name in a configuration that no command line has checked."""

    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> Any:
        message = filter_message(os.environ)
        if message is not None and is_ours(backend_of(self)):
            raise ValueError(f"{message}.")
        return original(self, *args, **kwargs)

    return __post_init__
