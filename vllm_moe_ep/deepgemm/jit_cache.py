"""The folder in which DeepGEMM keeps compiled kernels.

The library reads DG_JIT_CACHE_DIR once, at its import; the folder must exist by then.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

CACHE_VARIABLE = "DG_JIT_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class JitCache:
    """An existing, writable folder; `warning` is what to log about it, once, or None."""

    path: Path
    warning: str | None = None


def prepare_jit_cache(environ: Mapping[str, str], is_library_imported: bool) -> JitCache:
    """Create the folder: what the variable names, else the one vLLM uses, else a temporary one.

    The caller puts the path into DG_JIT_CACHE_DIR.

    Args:
        is_library_imported: deep_gemm was imported before this call.

    Raises:
        DeepGemmUnavailableError: the folder that the variable names cannot be written, or no
            folder can.
    """
    explicit = environ.get(CACHE_VARIABLE, "").strip()
    if explicit:
        path = Path(os.path.abspath(explicit))
        fault = _fault(path)
        if fault is not None:
            raise DeepGemmUnavailableError(
                f"{CACHE_VARIABLE}={explicit!r} is no folder that DeepGEMM can write compiled "
                f"kernels to: {fault}. Set it to a writable folder, or unset it."
            )
        return JitCache(path)
    cache = _default_or_temporary(_default_path(environ))
    if not is_library_imported:
        return cache
    late = (
        f"deep_gemm was imported before {CACHE_VARIABLE} was set, so persistence of its compiled "
        f"kernels is off in this process. Set {CACHE_VARIABLE} before the start."
    )
    return JitCache(cache.path, late)


def _default_path(environ: Mapping[str, str]) -> Path:
    """vLLM's own choice, so that one cache serves this layer and vLLM's."""
    root = environ.get("VLLM_CACHE_ROOT", "").strip()
    if root:
        return Path(os.path.abspath(os.path.expanduser(root)), "deep_gemm")
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME", "").strip() or os.path.join(home, ".cache")
    return Path(os.path.abspath(cache), "vllm", "deep_gemm")


def _default_or_temporary(path: Path) -> JitCache:
    fault = _fault(path)
    if fault is None:
        return JitCache(path)
    # Named by user: in a shared folder, another one's kernels must not be run.
    private = Path(tempfile.gettempdir(), f"vllm-moe-ep-{os.getuid()}")
    temporary = private / "deep_gemm"
    temporary_fault = _private_fault(private) or _fault(temporary)
    if temporary_fault is not None:
        raise DeepGemmUnavailableError(
            f"DeepGEMM has no folder for compiled kernels: {fault}; {temporary_fault}. "
            f"Set {CACHE_VARIABLE} to a writable folder."
        )
    return JitCache(
        temporary,
        f"DeepGEMM keeps compiled kernels in {temporary}, which may not outlive this machine's "
        f"next start, because {fault}. Set {CACHE_VARIABLE} to a writable folder.",
    )


def _private_fault(folder: Path) -> str | None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as error:
        return f"{folder} cannot be made ({error.strerror})"
    return None if owner == os.getuid() else f"{folder} belongs to another user"


def _fault(folder: Path) -> str | None:
    """Why nothing can be written to `folder`, which is made if absent; None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permission bits tell little on network and read-only file systems.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror})"
