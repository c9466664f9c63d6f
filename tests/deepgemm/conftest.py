"""Paths of the helper modules in this folder; a toolkit and a folder for fake libraries."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_library import forget_fakes, hide_real_modules  # noqa: E402
from toolkits import make_toolkit  # noqa: E402


@pytest.fixture
def toolkit_and_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A toolkit in CUDA_HOME; where packages called deep_gemm and vllm are looked for."""
    folder = tmp_path / "site"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("")
    hide_real_modules(monkeypatch, folder)
    # The process's own, so that the fake library sees what the loader sets.
    root = make_toolkit(tmp_path / "cuda", "12.9")
    monkeypatch.setenv("CUDA_HOME", f":{root} ")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "removed below")
    monkeypatch.delenv("DG_JIT_CACHE_DIR")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    yield folder
    forget_fakes()
