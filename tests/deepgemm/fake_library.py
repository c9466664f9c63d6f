"""A deep_gemm package on disk, so that real imports run."""

import sys
from pathlib import Path

import pytest

from vllm_moe_ep.deepgemm.support import FEATURES
from vllm_moe_ep.deepgemm.symbols import needed_symbols

ROOTS = ("deep_gemm", "vllm", "kernels")
ALL_NAMES = sorted(
    {
        names[0]
        for feature in FEATURES
        for major in (9, 10)
        for names in needed_symbols(feature, major)
    }
)


def hide_real_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """For one test, packages called deep_gemm, vllm and kernels come from `folder` alone."""
    for name in list(sys.modules):
        if name.split(".")[0] in ROOTS:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(folder))


def forget_fakes() -> None:
    for name in list(sys.modules):
        if name.split(".")[0] in ROOTS:
            del sys.modules[name]


def write_library(
    site: Path,
    name: str = "deep_gemm",
    names: list[str] | None = None,
    failure: str | None = None,
    alignment: str = "128",
) -> None:
    """Package `name` in `site` with functions `names` (all by default), or one that raises.

    It keeps the environment of its import as `ENVIRON`.
    """
    parts = name.split(".")
    for end in range(1, len(parts)):
        package = site.joinpath(*parts[:end])
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
    lines = ["import os", "ENVIRON = dict(os.environ)", "__version__ = '2.8.1'"]
    if failure is not None:
        lines.append(f"raise {failure}")
    for function in ALL_NAMES if names is None else names:
        answer = alignment if "alignment" in function else repr(function)
        lines.append(f"def {function}(*args, **kwargs):\n    return {answer}")
    package = site.joinpath(*parts)
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("\n".join(lines) + "\n")
