"""The folder for compiled kernels: explicit, default, temporary, or refused."""

import os
import tempfile
from pathlib import Path

import pytest

from vllm_moe_ep.deepgemm.jit_cache import prepare_jit_cache
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "{}/home"}, "home/.cache/vllm/deep_gemm"),
        ({"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg"}, "xdg/vllm/deep_gemm"),
        ({"XDG_CACHE_HOME": "{}/xdg", "VLLM_CACHE_ROOT": "{}/vllm"}, "vllm/deep_gemm"),
        ({"VLLM_CACHE_ROOT": "{}/vllm", "DG_JIT_CACHE_DIR": " {}/mine "}, "mine"),
    ],
)
def test_order_of_places(tmp_path: Path, environ: dict[str, str], expected: str) -> None:
    filled = {name: value.format(tmp_path) for name, value in environ.items()}
    cache = prepare_jit_cache(filled, is_library_imported=False)
    assert cache.path == tmp_path / expected and cache.path.is_dir()
    assert cache.warning is None
    assert list(cache.path.iterdir()) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"vllm-moe-ep-{os.getuid()}"


def test_unwritable_home_falls_back_with_a_warning(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "home").touch()
    cache = prepare_jit_cache({"HOME": str(tmp_path / "home")}, is_library_imported=False)
    assert cache.path == temporary / "deep_gemm" and cache.path.is_dir()
    assert temporary.stat().st_mode & 0o777 == 0o700
    for words in (str(temporary), f"{tmp_path}/home", "Set DG_JIT_CACHE_DIR"):
        assert words in str(cache.warning)


def test_another_users_temporary_folder_is_not_used(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").touch()
    stranger = os.getuid() + 1
    temporary.with_name(f"vllm-moe-ep-{stranger}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(DeepGemmUnavailableError, match="belongs to another user.*DG_JIT_CACHE"):
        prepare_jit_cache({"HOME": str(tmp_path / "home")}, is_library_imported=False)


def test_explicit_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"DG_JIT_CACHE_DIR": str(tmp_path / "file"), "HOME": str(tmp_path)}
    with pytest.raises(DeepGemmUnavailableError, match="DG_JIT_CACHE_DIR=.*cannot be written"):
        prepare_jit_cache(environ, is_library_imported=False)


def test_library_imported_before_gives_one_warning(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    late = prepare_jit_cache(environ, is_library_imported=True)
    assert "persistence" in str(late.warning) and "before the start" in str(late.warning)
    environ["DG_JIT_CACHE_DIR"] = str(late.path)
    assert prepare_jit_cache(environ, is_library_imported=True).warning is None
