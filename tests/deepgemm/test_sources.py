"""Which library is imported, and what an import that fails turns into."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from fake_library import forget_fakes, hide_real_modules, write_library

from vllm_moe_ep.deepgemm.sources import (
    INSTALLED,
    VENDORED,
    already_imported,
    find_source,
    import_library,
)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # An empty vllm and kernels hide the installed ones.
    for name in ("vllm", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    hide_real_modules(monkeypatch, tmp_path)
    yield tmp_path
    forget_fakes()


def test_absent_names_what_was_looked_for() -> None:
    imported = import_library()
    assert imported.module is None and imported.state.kind == "absent"
    assert INSTALLED in imported.state.detail and VENDORED in imported.state.detail
    assert "hub" not in imported.state.detail


def test_installed_comes_before_vendored(site: Path) -> None:
    write_library(site, VENDORED)
    assert find_source() == VENDORED
    write_library(site, INSTALLED)
    assert find_source() == INSTALLED
    assert not already_imported()
    imported = import_library()
    assert imported.module is sys.modules[INSTALLED]
    assert imported.state.kind == "present" and imported.state.detail == "deep_gemm 2.8.1"
    assert VENDORED not in sys.modules
    assert already_imported()


def test_looking_for_the_vendored_copy_imports_nothing(site: Path) -> None:
    write_library(site, VENDORED)
    assert find_source() == VENDORED
    assert "vllm" not in sys.modules
    assert import_library().module is sys.modules[VENDORED]


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        ("ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13"),
        ("AssertionError", "AssertionError: no message"),
        ("OSError('no\\n  such file')", "OSError: no such file"),
        ("ModuleNotFoundError('No module named tvm_ffi')", "No module named tvm_ffi"),
    ],
)
def test_a_failing_import_is_shown_and_not_replaced(site: Path, failure: str, shown: str) -> None:
    write_library(site, INSTALLED, failure=failure)
    write_library(site, VENDORED)
    imported = import_library()
    assert imported.module is None and imported.state.kind == "broken"
    assert imported.state.detail.startswith("deep_gemm fails to import: ")
    assert shown in imported.state.detail
    assert VENDORED not in sys.modules


def test_hub_only_where_asked_for_and_last(site: Path) -> None:
    (site / "kernels" / "__init__.py").write_text(
        "import types\n"
        "CALLS = []\n"
        "def get_kernel(name, version):\n"
        "    CALLS.append((name, version))\n"
        "    return types.SimpleNamespace(__version__='2.5')\n"
    )
    assert find_source() is None
    imported = import_library(use_hub=True)
    assert imported.state.detail == "kernels-community/deep-gemm (Hugging Face hub) 2.5"
    assert sys.modules["kernels"].CALLS == [("kernels-community/deep-gemm", 2)]
    write_library(site, VENDORED)
    assert find_source(use_hub=True) == VENDORED


def test_a_plain_folder_called_kernels_is_no_hub_client(site: Path) -> None:
    (site / "kernels" / "__init__.py").unlink()
    sys.path_importer_cache.clear()
    imported = import_library(use_hub=True)
    assert imported.state.kind == "absent" and "hub" in imported.state.detail


def test_a_vllm_module_without_a_spec_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    assert find_source() is None
