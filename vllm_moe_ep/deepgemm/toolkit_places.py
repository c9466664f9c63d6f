"""Folders that may hold a CUDA toolkit, in the order in which they are tried.

Files and paths only: asking torch for its CUDA_HOME may initialise CUDA, after which a fork of
this process could not use the device.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLES = ("CUDA_HOME", "CUDA_PATH")
SYSTEM_FOLDERS = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/usr/lib/cuda")
PIP_FOLDERS = ("nvidia/cu13", "nvidia/cu12", "nvidia/cuda_nvcc")
CONDA_TARGET = "targets/x86_64-linux"
# Where distributions and people put single programs, nvcc wrappers among them.
_SHARED_PREFIXES = ("/usr", "/usr/local", "~/.local")
_HEADERS = ("include/cuda.h", f"{CONDA_TARGET}/include/cuda.h")
_TOOLKIT_MARKS = ("version.json", "version.txt", *_HEADERS)


@dataclass(frozen=True, slots=True)
class Place:
    """One candidate: `root` should hold bin/nvcc; `origin` says what led there."""

    origin: str
    root: Path

    @property
    def fault(self) -> str | None:
        """Why this is no toolkit, in words; None if it is one."""
        # os.path takes a folder that may not be entered for an absent one, pathlib raises.
        nvcc = self.root / "bin" / "nvcc"
        if not os.path.exists(self.root):
            return "does not exist"
        if not os.path.isdir(self.root):
            return "is not a folder"
        if not os.path.isfile(nvcc):
            return "has no bin/nvcc"
        return None if os.access(nvcc, os.X_OK) else "has a bin/nvcc that is not executable"

    @property
    def is_wrapper_only(self) -> bool:
        """An nvcc in a shared prefix without a toolkit around it: a script that calls another."""
        shared = (Path(prefix).expanduser() for prefix in _SHARED_PREFIXES)
        has_mark = any(os.path.exists(self.root / mark) for mark in _TOOLKIT_MARKS)
        return self.root in shared and not has_mark

    def __str__(self) -> str:
        return f"{self.root} ({self.origin})"


def header_files(root: Path) -> list[Path]:
    """Where a toolkit at `root` keeps cuda.h."""
    return [root / header for header in _HEADERS]


def explicit_place(environ: Mapping[str, str]) -> Place | None:
    """The folder that CUDA_HOME or else CUDA_PATH names; None if neither names one.

    Blanks and stray colons around the path are dropped: `CUDA_HOME=$CUDA_HOME:/usr/local/cuda`
    with an unset CUDA_HOME gives a leading colon. A value with several folders stays as it is
    and is then reported as missing.
    """
    for variable in VARIABLES:
        text = environ.get(variable, "").strip(": \t\r\n")
        if text:
            return Place(f"{variable}={environ[variable]!r}", Path(os.path.abspath(text)))
    return None


def searched_places(
    environ: Mapping[str, str], system_folders: Sequence[str], package_folders: Sequence[str]
) -> list[Place]:
    """Candidates where no variable names one: PATH, system folders, conda, pip packages."""
    return [
        *_on_path(environ.get("PATH", "")),
        *(Place("system folder", root) for root in _expanded(system_folders)),
        *_conda(environ.get("CONDA_PREFIX", "").strip()),
        *_pip(package_folders),
    ]


def _on_path(path: str) -> Iterator[Place]:
    for folder in filter(None, (entry.strip() for entry in path.split(os.pathsep))):
        nvcc = Path(os.path.abspath(folder)) / "nvcc"
        if os.path.isfile(nvcc):
            # A link in /usr/bin or /etc/alternatives leads to the toolkit it came with.
            for root in dict.fromkeys((nvcc.resolve().parent.parent, nvcc.parent.parent)):
                yield Place(f"nvcc on PATH, {nvcc}", root)


def _expanded(folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        path = Path(folder)
        if "*" in path.name:
            yield from sorted(path.parent.glob(path.name), key=_numbers, reverse=True)
        else:
            yield path


def _numbers(path: Path) -> list[int]:
    """cuda-12.10 is newer than cuda-12.9."""
    return [int(digits) for digits in re.findall(r"\d+", path.name)]


def _conda(prefix: str) -> Iterator[Place]:
    if prefix:
        yield Place("CONDA_PREFIX", Path(prefix))
        yield Place("CONDA_PREFIX", Path(prefix) / CONDA_TARGET)


def _pip(package_folders: Sequence[str]) -> Iterator[Place]:
    for folder in filter(None, package_folders):
        if os.path.isdir(Path(folder) / "nvidia"):
            for name in PIP_FOLDERS:
                yield Place("pip package", Path(folder) / name)
