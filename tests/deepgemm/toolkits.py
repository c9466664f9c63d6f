"""Folders that look like CUDA toolkits, with an nvcc that prints what a test wants."""

from pathlib import Path

ASKED = "nvcc-was-asked"


def make_toolkit(
    root: Path, release: str = "12.9", script: str | None = None, **files: str
) -> Path:
    """A toolkit in `root`; `files` are version_json, version_txt or cuda_h.

    The fake nvcc leaves a file ASKED beside it and runs `script`, by default one that prints a
    release line.
    """
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    line = f"Cuda compilation tools, release {release}, V{release}.41"
    body = f"echo '{line}'" if script is None else script
    nvcc.write_text(f"#!/bin/sh\ntouch '{nvcc.parent / ASKED}'\n{body}\n")
    nvcc.chmod(0o755)
    names = {
        "version_json": "version.json",
        "version_txt": "version.txt",
        "cuda_h": "include/cuda.h",
        "conda_cuda_h": "targets/x86_64-linux/include/cuda.h",
    }
    for key, text in files.items():
        file = root / names[key]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def was_asked(root: Path) -> bool:
    return (root / "bin" / ASKED).exists()
