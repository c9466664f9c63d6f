"""Where the deep_gemm library may come from, in order, and its import.

An installed `deep_gemm` comes before the copy in vLLM's wheel, as in vLLM itself. The first that
is present decides: one that fails to import is reported, since a silent step to the next would
run other kernels than the user installed. Modules are imported by name, so that this package
needs neither of them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vllm_moe_ep.deepgemm.support import LibraryState

INSTALLED = "deep_gemm"
VENDORED = "vllm.third_party.deep_gemm"
HUB_REPOSITORY = "kernels-community/deep-gemm"
# Generation 2 of the repository's kernels, which is DeepGEMM 2.5 and newer.
HUB_VERSION = 2
_HUB_SOURCE = f"{HUB_REPOSITORY} (Hugging Face hub)"


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import: the module, or None with the reason in `state`."""

    source: str
    module: ModuleType | None
    state: LibraryState


def find_source(use_hub: bool = False) -> str | None:
    """Name of the first source that is present; imports nothing.

    Args:
        use_hub: after both modules, take Hugging Face's kernel hub where `kernels` is installed.
    """
    names = (name for name in (INSTALLED, VENDORED) if _is_present(name))
    return next(names, _HUB_SOURCE if use_hub and _is_present("kernels") else None)


def already_imported() -> bool:
    """A deep_gemm was imported by someone else, and has read its variables."""
    return any(name in sys.modules for name in (INSTALLED, VENDORED))


def absent(use_hub: bool) -> LibraryState:
    """The state where `find_source` finds nothing, with every name it looked for."""
    names = [INSTALLED, VENDORED, *(["kernels (for the Hugging Face hub)"] if use_hub else [])]
    return LibraryState("absent", f"none of {', '.join(names)} is installed")


def import_library(use_hub: bool = False) -> Imported:
    """Import the first source that is present. Never raises for what an import does."""
    source = find_source(use_hub)
    if source is None:
        return Imported("", None, absent(use_hub))
    load: Callable[[], ModuleType] = (
        _from_hub if source == _HUB_SOURCE else lambda: importlib.import_module(source)
    )
    try:
        module = load()
    except Exception as error:
        # Compiled libraries fail with anything from OSError to AssertionError.
        text = " ".join(str(error).split()) or "no message"
        detail = f"{source} fails to import: {type(error).__name__}: {text}"
        return Imported(source, None, LibraryState("broken", detail))
    version = getattr(module, "__version__", "of unknown version")
    return Imported(source, module, LibraryState("present", f"{source} {version}"))


def _from_hub() -> ModuleType:
    kernels = importlib.import_module("kernels")
    return kernels.get_kernel(HUB_REPOSITORY, version=HUB_VERSION)


def _is_present(name: str) -> bool:
    """Without importing a parent package: vllm takes seconds and reads the environment."""
    if name in sys.modules:
        return sys.modules[name] is not None
    top, *inner = name.split(".")
    folders = _package_folders(top)
    return any((Path(folder, *inner) / "__init__.py").is_file() for folder in folders)


def _package_folders(top: str) -> list[str]:
    if top in sys.modules:
        return list(getattr(sys.modules[top], "__path__", []))
    spec = importlib.util.find_spec(top)
    return [] if spec is None else list(spec.submodule_search_locations or [])
