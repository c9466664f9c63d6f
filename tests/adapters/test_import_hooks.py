"""Callbacks run once, right after their module was imported, never before."""

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from vllm_moe_ep.adapters.vllm.import_hooks import when_imported
from vllm_moe_ep.adapters.vllm.wrapping import wrap_attribute


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"hooked_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_callback_waits_for_the_import(module_name: str) -> None:
    seen: list[ModuleType] = []
    when_imported(module_name, seen.append)
    when_imported(module_name, lambda module: setattr(module, "value", 2))
    assert seen == []
    module = __import__(module_name)
    assert seen == [module]
    assert module.value == 2


def test_callback_runs_at_once_when_already_imported(module_name: str) -> None:
    module = __import__(module_name)
    seen: list[ModuleType] = []
    when_imported(module_name, seen.append)
    assert seen == [module]


def test_exception_of_a_callback_reaches_the_importer(module_name: str) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("hook failed")

    when_imported(module_name, fail)
    with pytest.raises(RuntimeError, match="hook failed"):
        __import__(module_name)
    assert module_name not in sys.modules


def test_wrap_attribute_wraps_once_and_keeps_static_methods() -> None:
    class Owner:
        @staticmethod
        def double(x: int) -> int:
            return 2 * x

    def plus_one(original):  # type: ignore[no-untyped-def]
        return lambda x: original(x) + 1

    wrap_attribute(Owner, "double", plus_one)
    wrap_attribute(Owner, "double", plus_one)
    assert Owner().double(3) == 7


def test_the_module_keeps_its_own_loader(module_name: str) -> None:
    when_imported(module_name, lambda module: None)
    module = __import__(module_name)
    assert module.__spec__ is not None
    assert module.__loader__ is module.__spec__.loader
    assert isinstance(module.__loader__, SourceFileLoader)


def test_callback_waits_for_the_import_that_succeeds(module_name: str, tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    when_imported(module_name, seen.append)
    (tmp_path / f"{module_name}.py").write_text("raise ImportError('not yet')\n")
    with pytest.raises(ImportError, match="not yet"):
        __import__(module_name)
    assert seen == []
    (tmp_path / f"{module_name}.py").write_text("value = 1  # another length\n")
    assert seen == [__import__(module_name)]
