"""The version of a CUDA toolkit: from its files, else from nvcc itself.

Files come first, without a subprocess: version.json, version.txt, cuda.h. Some layouts (pip's
`nvidia/cuda_nvcc`, distribution packages) have none of them; only then is nvcc asked, for a few
seconds at most.

What cannot be read is not guessed. Version files that are there but say nothing mark a damaged
toolkit, which is refused. A silent nvcc without such files is a warning: the compiler may be
sound, and DeepGEMM reports one that is not with its first kernel.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_ep.deepgemm.toolkit_places import header_files

NVCC_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class ToolkitVersion:
    """What was found out.

    Attributes:
        number: (major, minor), or None where it could not be read.
        source: the file or command that told it, or why none did.
        is_damaged: version files exist, and none is readable.
    """

    number: tuple[int, int] | None
    source: str
    is_damaged: bool = False

    def __str__(self) -> str:
        return "unknown" if self.number is None else ".".join(map(str, self.number))


def read_version(root: Path, timeout_s: float = NVCC_TIMEOUT_S) -> ToolkitVersion:
    """Version of the toolkit in `root`. Never raises for what a file or nvcc may hold."""
    present = [(file, reader) for file, reader in _sources(root) if os.path.isfile(file)]
    for file, reader in present:
        number = reader(_text(file))
        if number is not None:
            return ToolkitVersion(number, str(file))
    if present:
        names = ", ".join(str(file) for file, _ in present)
        return ToolkitVersion(None, f"no version can be read from {names}", is_damaged=True)
    return _ask_nvcc(root / "bin" / "nvcc", timeout_s)


def _text(file: Path) -> str:
    """Empty where it may not be read, which then counts as a file that says nothing."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


Reader = Callable[[str], tuple[int, int] | None]


def _sources(root: Path) -> list[tuple[Path, Reader]]:
    headers: list[tuple[Path, Reader]] = [(file, _from_header) for file in header_files(root)]
    return [(root / "version.json", _from_json), (root / "version.txt", _from_text), *headers]


def _from_json(text: str) -> tuple[int, int] | None:
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    for name in ("cuda_nvcc", "cuda"):
        part = parts.get(name) if isinstance(parts, dict) else None
        number = _first_number(str(part.get("version"))) if isinstance(part, dict) else None
        if number is not None:
            return number
    return None


def _from_text(text: str) -> tuple[int, int] | None:
    return _first_number(text)


def _first_number(text: str) -> tuple[int, int] | None:
    match = re.search(r"(\d{1,6})\.(\d{1,6})", text)
    return (int(match[1]), int(match[2])) if match else None


def _from_header(text: str) -> tuple[int, int] | None:
    """CUDA_VERSION is 1000 * major + 10 * minor."""
    match = re.search(r"^\s*#\s*define\s+CUDA_VERSION\s+(\d{1,9})\b", text, re.MULTILINE)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


def _ask_nvcc(nvcc: Path, timeout_s: float) -> ToolkitVersion:
    command = f"{nvcc} --version"
    try:
        process = subprocess.Popen(
            [nvcc, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return ToolkitVersion(None, f"{command} does not start: {error}")
    with process:
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # The whole group: nvcc may be a script that waits for a child.
            os.killpg(process.pid, signal.SIGKILL)
            return ToolkitVersion(None, f"{command} gave no answer within {timeout_s:g} s")
    match = re.search(r"release (\d{1,6})\.(\d{1,6})", printed)
    if process.returncode != 0:
        return ToolkitVersion(None, f"{command} exits with status {process.returncode}")
    if match is None:
        return ToolkitVersion(None, f"{command} prints no release number")
    return ToolkitVersion((int(match[1]), int(match[2])), command)
