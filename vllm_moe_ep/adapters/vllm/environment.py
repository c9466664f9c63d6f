"""Environment variables: ours made known to vLLM, and one from a server to its workers."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm_moe_ep.envs import VARIABLES

logger = logging.getLogger("vllm.vllm_moe_ep")

_REFUSAL_FILE = "STATIC_EP_REFUSAL_FILE"
"""Where workers leave why they cannot start. vLLM warns about names that begin with VLLM_."""


def declare_variables(vllm_envs: Any) -> None:
    """Add those of our variables that are set to vLLM's table.

    They then count in the key of vLLM's compile cache too. Unset ones are left out, so that the
    key of every other engine stays as it was.
    """
    for variable in VARIABLES:
        if variable.env_name in os.environ:
            vllm_envs.environment_variables.setdefault(
                variable.env_name, _reader(variable.env_name)
            )


def _reader(name: str) -> Any:
    return lambda: os.environ.get(name)


@contextlib.contextmanager
def shared_refusal() -> Iterator[Callable[[], str]]:
    """While this lasts, `leave_refusal` of child processes reaches this one.

    The function that it yields returns their texts, each once and on a line. What they share is a
    file in memory, which goes with this process.
    """
    if not hasattr(os, "memfd_create") or _REFUSAL_FILE in os.environ:
        yield lambda: ""
        return
    with open(os.memfd_create("static-ep refusal"), "r+b") as file:
        os.environ[_REFUSAL_FILE] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        try:
            yield lambda: _each_once(os.pread(file.fileno(), 2**20, 0))
        finally:
            del os.environ[_REFUSAL_FILE]


def _each_once(content: bytes) -> str:
    return "\n".join(dict.fromkeys(content.decode("utf-8", errors="replace").splitlines()))


def leave_refusal(text: str) -> None:
    """Tell the server that started this process, if one did."""
    name = os.environ.get(_REFUSAL_FILE)
    if name is None:
        return
    try:
        with open(name, "ab") as file:
            file.write(f"{' '.join(text.split())}\n".encode())
    except OSError as error:
        # The log of this process has the text, too.
        logger.debug("static-ep: the server cannot be told why its worker ends: %s", error)
