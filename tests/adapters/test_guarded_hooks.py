"""A hook that does not fit the installed vLLM: unnoticed until static-ep is chosen, then named.

The hooks come from the plugin's own tables, so that a new one is tested here without being listed.
"""

import argparse
import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import set_current_vllm_config
from vllm_neuron_stand_in import PACKAGES

from tests.adapters.conftest import MakeConfig
from vllm_moe_ep.adapters.vllm import cures, failed_hooks, hooks, plugin, plugin_filter, wrapping
from vllm_moe_ep.adapters.vllm.hooks import Hook
from vllm_moe_ep.errors import UnsupportedError

ALL = (*plugin.HOOKS, *plugin.NEURON_HOOKS, *plugin.CURE_HOOKS)
OURS = {"moe_backend": "static-ep"}
CURRENT_CONFIG = "vllm.config.vllm.get_current_vllm_config_or_none"
each_hook = pytest.mark.parametrize("hook", ALL, ids=[hook.target for hook in ALL])
each_wrap = pytest.mark.parametrize(
    "hook",
    [hook for hook in (*ALL, *plugin_filter.HOOKS) if hook.kind == "wrap"],
    ids=lambda hook: hook.function,
)


@pytest.fixture(autouse=True)
def _nothing_failed_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cures, "_active", set())
    failed_hooks.forget()
    yield
    failed_hooks.forget()


@pytest.fixture(autouse=True)
def _neuron_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm_neuron", "nki")]:
        del sys.modules[name]


@contextmanager
def without(hook: Hook) -> Iterator[None]:
    """vLLM without the attribute."""
    owner, name = hook.find_owner(), hook.attribute
    with pytest.MonkeyPatch.context() as patch:
        if name in getattr(owner, "__dataclass_fields__", {}):
            patch.delitem(owner.__dataclass_fields__, name)
        else:
            patch.delattr(owner, name)
        yield


def unwrap(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put vLLM's own function back, as it is where the hook was never applied."""
    owner = hook.find_owner()
    current = vars(owner)[hook.attribute]
    function = getattr(current, "__func__", current)
    if hasattr(function, wrapping.MARK):
        original = getattr(function, wrapping.MARK)
        is_bound = isinstance(current, staticmethod | classmethod)
        monkeypatch.setattr(
            owner, hook.attribute, type(current)(original) if is_bound else original
        )


def fail(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens in a process whose vLLM lacks the attribute when it imports the module."""
    module = importlib.import_module(hook.module)
    unwrap(hook, monkeypatch)
    with without(hook):
        hooks.apply_guarded(hook, module)


@each_hook
def test_missing_attribute_does_not_disturb_other_backends(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: Hook,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.DEBUG, "vllm.vllm_moe_ep")
    fail(hook, monkeypatch)
    lines = [record for record in caplog.records if record.name == "vllm.vllm_moe_ep"]
    # One record may reach the capture through two loggers.
    assert [line.levelname for line in set(lines)] == ["DEBUG"]
    assert hook.target in lines[0].getMessage()
    assert make_config().kernel_config.moe_backend == "auto"
    assert parse("triton") == "triton"


@each_hook
def test_missing_attribute_is_named_once_static_ep_is_chosen(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    """By every check but the one whose own hook failed."""
    fail(hook, monkeypatch)
    checks = {
        "vllm.config.vllm.VllmConfig.__post_init__": lambda: make_config(**OURS),
        "vllm.engine.arg_utils.EngineArgs.add_cli_args": lambda: parse("static-ep"),
        f"{BASE_LOADER}.create_model": lambda: create_model(chosen()),
    }
    checks.pop(hook.target, None)
    assert len(checks) >= 2
    for check in checks.values():
        with pytest.raises((UnsupportedError, argparse.ArgumentError)) as caught:
            check()
        text = str(caught.value)
        assert f"{hook.target} (" in text
        assert "is not there" in text or "is no field" in text
        assert f"installed vLLM {vllm.__version__}" in text
        assert "0.32 or 0.33" in text


@each_hook
def test_module_imported_while_a_model_is_built_is_refused_at_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    if hook.target == CURRENT_CONFIG:
        return  # without it nobody knows what is being built
    module = importlib.import_module(hook.module)
    config = make_config(**OURS)
    unwrap(hook, monkeypatch)
    with set_current_vllm_config(config), without(hook):
        with pytest.raises(UnsupportedError, match=hook.target):
            hooks.apply_guarded(hook, module)


BASE_LOADER = "vllm.model_executor.model_loader.base_loader.BaseModelLoader"


def parse(backend: str) -> str:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    value: str = parser.parse_args(["--moe-backend", backend]).moe_backend
    return value


def chosen() -> Any:
    return SimpleNamespace(kernel_config=SimpleNamespace(moe_backend="static_ep"))


def create_model(config: Any) -> None:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    BaseModelLoader.create_model(SimpleNamespace(), config, None)


@each_wrap
@pytest.mark.parametrize("config", [None, SimpleNamespace(), SimpleNamespace(kernel_config=1)])
def test_wrapper_hands_over_whatever_it_is_called_with(hook: Hook, config: Any) -> None:
    calls: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "result"

    wrapper: Callable[..., Any] = hook.load_function()(original)
    owner = SimpleNamespace(vllm_config=config)
    assert wrapper(owner, 1, *[config], unheard_of=2) == "result"
    assert calls == [((owner, 1, config), {"unheard_of": 2})]


@each_hook
def test_failure_of_our_own_code_is_remembered_with_its_type(
    monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    if hook.kind == "need":
        return  # runs nothing
    module = importlib.import_module(hook.module)
    unwrap(hook, monkeypatch)

    def break_off(self: Hook) -> Any:
        raise ImportError("cannot import name 'Thing'")

    monkeypatch.setattr(Hook, "load_function", break_off)
    hooks.apply_guarded(hook, module)
    with pytest.raises(UnsupportedError, match="ImportError: cannot import name 'Thing'"):
        failed_hooks.refuse_if_any()


@pytest.mark.parametrize("hook", [hook for hook in ALL if hook.parameters], ids=lambda h: h.target)
def test_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch, hook: Hook) -> None:
    module = importlib.import_module(hook.module)

    def other(self: Any, renamed: Any) -> None: ...

    monkeypatch.setattr(hook.find_owner(), hook.attribute, other)
    hooks.apply_guarded(hook, module)
    assert vars(hook.find_owner())[hook.attribute] is other
    with pytest.raises(UnsupportedError, match=f"no parameter {', '.join(hook.parameters)}"):
        failed_hooks.refuse_if_any()


def test_a_type_that_cannot_be_rebuilt_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from typing import Literal

    from pydantic import dataclasses
    from vllm.config import KernelConfig

    hook = next(hook for hook in ALL if hook.function == "backend_name.widen_kernel_config")
    field = KernelConfig.__dataclass_fields__["moe_backend"]
    stock = Literal["auto", "triton"]
    monkeypatch.setattr(field, "type", stock)
    monkeypatch.setitem(KernelConfig.__annotations__, "moe_backend", stock)
    rebuilt: list[Any] = []

    def rebuild(config_class: Any, force: bool) -> None:
        rebuilt.append(field.type)
        if field.type != stock:
            raise TypeError("takes no force")

    monkeypatch.setattr(dataclasses, "rebuild_dataclass", rebuild)
    hooks.apply_guarded(hook, importlib.import_module(hook.module))
    assert field.type == KernelConfig.__annotations__["moe_backend"] == stock
    assert rebuilt[-1] == stock
    with pytest.raises(UnsupportedError, match="TypeError: takes no force"):
        failed_hooks.refuse_if_any()


@each_hook
def test_module_that_is_gone_is_named_on_its_platform(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    is_there = hooks._is_there
    monkeypatch.setattr(hooks, "_is_there", lambda name: name != hook.module and is_there(name))
    if hook.platform is not None:
        hooks.refuse_failed("cuda")
        assert failed_hooks.all_failed() == ()
    with pytest.raises(UnsupportedError, match=f"the module {hook.module} is not there"):
        hooks.refuse_failed(hook.platform or "cuda")


def test_every_module_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in ALL:
        monkeypatch.delitem(sys.modules, hook.module, raising=False)
        assert hooks._is_there(hook.module), hook.module
        assert hook.module not in sys.modules
    assert not hooks._is_there("vllm.model_executor.models.deepseek_v99")
    assert not hooks._is_there("vllm.envs.no_package")


def test_hooks_for_the_cpu_touch_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(Hook, "apply", lambda self: pytest.fail("was applied"))
    of_cpu = [hook for hook in ALL if hook.platform == "cpu"]
    assert len(of_cpu) >= 9
    for hook in of_cpu:
        hooks.apply_guarded(hook, importlib.import_module(hook.module))


def test_import_succeeds_where_a_hook_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"hooked_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(hooks, "_installed", {})
    hooks.install([Hook(name, f"{name}.Absent.method", "stock_guard.with_guard")])
    assert __import__(name).value == 1
    assert failed_hooks.all_failed() == (
        failed_hooks.FailedHook(f"{name}.Absent.method", "Absent is not there"),
    )


NO_HOOK_FITS = """
from vllm_moe_ep.adapters.vllm import hooks
from vllm_moe_ep.adapters.vllm.wrapping import MissingAttributeError

def find_owner(self):
    raise MissingAttributeError("it is not there")

hooks.Hook.find_owner = find_owner

from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm_moe_ep.adapters.vllm import failed_hooks
load_general_plugins()
args = EngineArgs(model={model!r}, skip_tokenizer_init=True, load_format="dummy")
config = args.create_engine_config()
print("stock:", config.kernel_config.moe_backend, len(failed_hooks.all_failed()) > 5)
"""


def test_a_vllm_that_no_hook_fits_builds_its_configuration(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    make_config()  # writes the model's config.json
    done = subprocess.run(
        [sys.executable, "-c", NO_HOOK_FITS.format(model=str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "stock: auto True" in done.stdout, done.stderr


def test_supported_versions_are_those_that_the_package_asks_for() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    first, last = failed_hooks.SUPPORTED_VERSIONS
    following = f"0.{int(last.partition('.')[2]) + 1}"
    assert f'cuda = ["vllm>={first},<{following}"]' in project
