"""`vllm serve` ends with our sentence, last and without a traceback, when static-ep refuses."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_moe_ep.adapters.vllm import choice, environment
from vllm_moe_ep.adapters.vllm.wrapping import argument
from vllm_moe_ep.errors import CheckpointError, SettingsError, UnsupportedError

REFUSALS = (CheckpointError, SettingsError, UnsupportedError)
_LOCAL = ("/", "./", "../", "~")


def with_short_refusals(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the process of the command line: exit with 2 where nothing was started, else with 1."""

    @functools.wraps(original)
    def cmd(*args: Any, **kwargs: Any) -> Any:
        options = argument(original, "args", args, kwargs)
        if not _is_asked_for(options):
            return original(*args, **kwargs)
        with environment.shared_refusal() as refusal_of_workers:
            try:
                _refuse_missing_folder(options)
                return original(*args, **kwargs)
            except REFUSALS as error:
                _end(str(error), 2)
            except Exception:
                text = refusal_of_workers()
                if not text:
                    raise
                # A worker's log has the traceback; vLLM's own error only points there.
                _end(text, 1)

    return cmd


def with_refusal_for_the_parent(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the process that loads a model: hand a refusal to the process of the command line."""

    @functools.wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except REFUSALS as error:
            environment.leave_refusal(str(error))
            raise

    return load_model


def _is_asked_for(options: Any) -> bool:
    kernel_config = getattr(options, "kernel_config", None)
    return choice.is_ours(getattr(options, "moe_backend", None)) or choice.is_ours(
        getattr(kernel_config, "moe_backend", None)
    )


def _refuse_missing_folder(options: Any) -> None:
    """vLLM takes a path that does not exist for the name of a repository."""
    model = getattr(options, "model_tag", None) or getattr(options, "model", None)
    if isinstance(model, str) and model.startswith(_LOCAL) and not Path(model).exists():
        raise SettingsError(f"The model {model} does not exist: name its folder.")


def _end(text: str, status: int) -> None:
    print(f"vllm serve: {text}", file=sys.stderr, flush=True)
    sys.exit(status)
