"""Find the CUDA toolkit that DeepGEMM compiles with, and judge its version for a device.

torch's own CUDA version plays no part: the nvcc that will run decides.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_ep.deepgemm.toolkit_places import (
    PIP_FOLDERS,
    SYSTEM_FOLDERS,
    VARIABLES,
    Place,
    explicit_place,
    searched_places,
)
from vllm_moe_ep.deepgemm.toolkit_version import NVCC_TIMEOUT_S, ToolkitVersion, read_version
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

# Major compute capability -> first toolkit that compiles for it: 12.3 knows the wgmma forms
# DeepGEMM uses on SM90, 12.9 the family target sm_100f.
MINIMUM_VERSIONS = {9: (12, 3), 10: (12, 9)}
_REMEDY = (
    "Set CUDA_HOME to the folder of a CUDA toolkit, the one that holds bin/nvcc; "
    "pip install nvidia-cuda-nvcc brings one"
)


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A toolkit: absolute `root` with bin/nvcc in it, what led there, and its version."""

    root: Path
    origin: str
    version: ToolkitVersion

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    @property
    def warning(self) -> str | None:
        """What to log where the version could not be read but nothing speaks against it."""
        if self.version.number is not None or self.version.is_damaged:
            return None
        return f"The version of the CUDA toolkit in {self.root} is unknown: {self.version.source}."

    def fault_for(self, capability: tuple[int, int]) -> str | None:
        """Why this toolkit cannot compile for the device, in words; None if it can.

        Args:
            capability: compute capability (major, minor), the major one of MINIMUM_VERSIONS.
        """
        needed = MINIMUM_VERSIONS[capability[0]]
        wanted = f"DeepGEMM on SM{capability[0]}{capability[1]} needs nvcc {needed[0]}.{needed[1]}"
        if self.version.is_damaged:
            return (
                f"{wanted} or newer, but the toolkit in {self.root} ({self.origin}) is damaged: "
                f"{self.version.source}. Install it again, or set CUDA_HOME to another one."
            )
        if self.version.number is None or self.version.number >= needed:
            return None
        return (
            f"{wanted} or newer, found {self.version} at {self.nvcc} (told by "
            f"{self.version.source}). Install a newer toolkit and set CUDA_HOME to it."
        )


def find_toolkit(
    environ: Mapping[str, str],
    system_folders: Sequence[str] = SYSTEM_FOLDERS,
    package_folders: Sequence[str] | None = None,
    timeout_s: float = NVCC_TIMEOUT_S,
) -> Toolkit:
    """The toolkit to use: CUDA_HOME, CUDA_PATH, nvcc on PATH, system folders, conda, pip.

    Args:
        system_folders: paths; a `*` in the last part stands for any version, newest first.
        package_folders: where Python packages are installed; sys.path when None.
        timeout_s: longest wait for `nvcc --version`, where it has to be asked.

    Raises:
        DeepGemmUnavailableError: none was found, or the variable names no toolkit. Lists every
            place searched and the variable to set.
    """
    packages = sys.path if package_folders is None else package_folders
    searched = searched_places(environ, system_folders, packages)
    usable = [place for place in searched if place.fault is None]
    # A wrapper works, but DeepGEMM also wants the headers beside nvcc: last resort.
    usable.sort(key=lambda place: place.is_wrapper_only)
    explicit = explicit_place(environ)
    if explicit is not None and explicit.fault is not None:
        raise DeepGemmUnavailableError(_explicit_message(explicit, usable))
    if explicit is None and not usable:
        raise DeepGemmUnavailableError(_nothing_message(searched, packages))
    chosen = explicit or usable[0]
    return Toolkit(chosen.root, chosen.origin, read_version(chosen.root, timeout_s))


def _explicit_message(place: Place, usable: Sequence[Place]) -> str:
    variable = place.origin.partition("=")[0]
    if usable:
        hint = f"Or unset {variable}: then {usable[0]} is used."
    else:
        hint = "No other toolkit was found on PATH, in system folders, conda or pip packages."
    return f"{place.origin} names no CUDA toolkit: {place.root} {place.fault}. {_REMEDY}. {hint}"


def _nothing_message(searched: Sequence[Place], packages: Sequence[str]) -> str:
    origins = {place.origin.partition(",")[0] for place in searched}
    seen = [f"{variable} is not set" for variable in VARIABLES]
    if "nvcc on PATH" not in origins:
        seen.append("PATH has no nvcc")
    seen += [f"{place} {place.fault}" for place in searched]
    if "CONDA_PREFIX" not in origins:
        seen.append("CONDA_PREFIX is not set")
    if "pip package" not in origins:
        names = ", ".join(PIP_FOLDERS)
        seen.append(f"no {names} in {', '.join(filter(None, packages)) or 'any package folder'}")
    return f"No CUDA toolkit was found for DeepGEMM. Searched: {'; '.join(seen)}. {_REMEDY}."
