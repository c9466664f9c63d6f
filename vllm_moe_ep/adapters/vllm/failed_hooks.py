"""Hooks that did not fit the installed vLLM: remembered, and refused once static-ep is chosen."""

import importlib.metadata
import logging
import sys
from dataclasses import dataclass

from vllm_moe_ep.adapters.vllm.wrapping import ChangedSignatureError, MissingAttributeError
from vllm_moe_ep.errors import UnsupportedError

logger = logging.getLogger("vllm.vllm_moe_ep")

SUPPORTED_VERSIONS = ("0.32", "0.33")


@dataclass(frozen=True, slots=True)
class FailedHook:
    """One hook that is not in place.

    Attributes:
        target: dotted name of the attribute of vLLM.
        reason: why it could not be hooked.
    """

    target: str
    reason: str


_failed: dict[str, FailedHook] = {}


def remember(target: str, error: Exception) -> None:
    """Note why `target` is not hooked. vLLM goes on as if the plugin were not installed."""
    is_expected = isinstance(error, MissingAttributeError | ChangedSignatureError)
    reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
    _failed[target] = FailedHook(target, " ".join(reason.split()))
    logger.debug(
        "static-ep: vLLM's %s is not hooked, so that --moe-backend static-ep cannot be chosen: %s",
        target,
        reason,
    )


def all_failed() -> tuple[FailedHook, ...]:
    """What failed in this process so far."""
    return tuple(_failed.values())


def forget() -> None:
    """Start over, as in a new process."""
    _failed.clear()


def refuse_if_any() -> None:
    """To be called where static-ep is chosen.

    Raises:
        UnsupportedError: hooks failed; names them and the versions that are supported.
    """
    if _failed:
        raise UnsupportedError(message())


def message() -> str:
    """One sentence about everything that failed, and one on what to do."""
    named = "; ".join(f"{failed.target} ({failed.reason})" for failed in _failed.values())
    return (
        f"--moe-backend static-ep cannot run in the installed {_installed_versions()}, in which "
        f"it does not find what it needs: {named}. Install vLLM "
        f"{' or '.join(SUPPORTED_VERSIONS)}, which are supported, or choose another --moe-backend."
    )


def _installed_versions() -> str:
    version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
    found = f"vLLM {version}"
    if any(target.startswith("vllm_neuron.") for target in _failed):
        found += f" with vllm-neuron {_neuron_version()}"
    return found


def _neuron_version() -> str:
    try:
        return importlib.metadata.version("vllm-neuron")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
