"""Gaps of vLLM's CPU platform that are closed while static-ep serves a quantised model.

Each cure is one module with its hooks. A hook leaves vLLM as it is until its cure is switched on
in this process; that takes a model that needs the cure, and a small test of numbers that passes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vllm_moe_ep.errors import UnsupportedError

logger = logging.getLogger("vllm.vllm_moe_ep")


@dataclass(frozen=True, slots=True)
class Cure:
    """One gap, and how to know that closing it works here.

    Attributes:
        name: unique.
        gap: what vLLM lacks, for the log and for the error.
        remedy: what the user can do where the cure does not work.
        failure: runs the test; None where it passes, else what went wrong.
    """

    name: str
    gap: str
    remedy: str
    failure: Callable[[], str | None]


_active: set[str] = set()


def is_active(cure: Cure) -> bool:
    """Whether the cure is switched on in this process."""
    return cure.name in _active


def switch_on(cure: Cure) -> None:
    """Test the cure and switch it on; once per process.

    Raises:
        UnsupportedError: the test failed; says what is missing and what to do.
    """
    if is_active(cure):
        return
    failure = cure.failure()
    if failure is not None:
        raise UnsupportedError(
            f"--moe-backend static-ep cannot serve this model here: {cure.gap}, and the plugin's "
            f"way around it does not work on this machine ({failure}). {cure.remedy}"
        )
    _active.add(cure.name)
    logger.info("static-ep: worked around, after a test of its numbers: %s", cure.gap)
