"""Hooks into vLLM that do no harm: one that does not fit is remembered, never raised at import.

Hooks are installed before a backend is chosen, in every process of every user of vLLM. Only once
static-ep is chosen may a failure end the start: see `failed_hooks`.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from vllm_moe_ep.adapters.vllm import choice, failed_hooks
from vllm_moe_ep.adapters.vllm.import_hooks import when_imported
from vllm_moe_ep.adapters.vllm.wrapping import MissingAttributeError, wrap_attribute

_OURS = "vllm_moe_ep.adapters.vllm"


@dataclass(frozen=True, slots=True)
class Hook:
    """One attribute of vLLM that is replaced, changed or needed.

    Attributes:
        module: the module of vLLM whose import is waited for.
        target: dotted name of the attribute.
        function: "module.name" in this folder, imported when it is used. For a wrap it takes the
            original and returns the wrapper, for a change it takes the owner of the attribute.
            A need has none: the attribute only has to be there.
        kind: what is done to the attribute.
        parameters: what the wrapper reads from the original's arguments, by name.
        platform: where the attribute is touched; on all platforms if None.
    """

    module: str
    target: str
    function: str = ""
    kind: Literal["wrap", "change", "need"] = "wrap"
    parameters: tuple[str, ...] = ()
    platform: Literal["cpu", "neuron"] | None = None

    @property
    def attribute(self) -> str:
        """The last part of the target's name."""
        return self.target.rpartition(".")[2]

    def is_for_this_platform(self) -> bool:
        """Whether vLLM runs on the hook's platform; asked once vLLM has been imported."""
        if self.platform is None:
            return True
        from vllm.platforms import current_platform

        is_cpu: bool = current_platform.is_cpu()
        # vllm-neuron's modules are imported on no other platform than theirs.
        return is_cpu if self.platform == "cpu" else self.module in sys.modules

    def apply(self) -> None:
        """Replace or change the attribute.

        Raises:
            MissingAttributeError: vLLM has no such attribute.
            ChangedSignatureError: it does not take the arguments that the wrapper reads.
        """
        owner = self.find_owner()
        if self.kind == "wrap":
            wrap_attribute(owner, self.attribute, self.load_function(), self.parameters)
        elif self.attribute not in vars(owner):
            raise MissingAttributeError("it is not there")
        elif self.kind == "change":
            self.load_function()(owner)

    def find_owner(self) -> Any:
        """The module or class that has the attribute."""
        owner_name = self.target.rpartition(".")[0]
        module_name = owner_name
        while module_name not in sys.modules:
            module_name = module_name.rpartition(".")[0]
            if not module_name:
                raise MissingAttributeError("its module is not there")
        owner: Any = sys.modules[module_name]
        for part in owner_name.removeprefix(module_name).split(".")[1:]:
            if not hasattr(owner, part):
                raise MissingAttributeError(f"{part} is not there")
            owner = getattr(owner, part)
        return owner

    def load_function(self) -> Any:
        """Import what makes the wrapper, or the change."""
        module, _, name = self.function.rpartition(".")
        return getattr(importlib.import_module(f"{_OURS}.{module}"), name)


_installed: dict[str, Hook] = {}


def install(hooks: Iterable[Hook]) -> None:
    """Apply each hook once its module has been imported. Imports nothing of vLLM itself."""
    for hook in hooks:
        _installed[hook.target] = hook
        when_imported(hook.module, functools.partial(apply_guarded, hook))


def apply_guarded(hook: Hook, module: ModuleType) -> None:
    """Apply `hook`; remember it if that fails.

    Raises:
        UnsupportedError: it failed, and vLLM builds a model with static-ep chosen.
    """
    try:
        if hook.is_for_this_platform():
            hook.apply()
    except Exception as error:
        failed_hooks.remember(hook.target, error)
        if choice.is_current():
            failed_hooks.refuse_if_any()


def refuse_failed(platform: str) -> None:
    """To be called where static-ep is chosen: are all hooks in place, or can they still be?

    Raises:
        UnsupportedError: a hook failed, or its module is not in this vLLM.
    """
    for hook in _installed.values():
        if hook.platform in (None, platform) and not _is_there(hook.module):
            error = MissingAttributeError(f"the module {hook.module} is not there")
            failed_hooks.remember(hook.target, error)
    failed_hooks.refuse_if_any()


def _is_there(module_name: str) -> bool:
    """Whether a module was or could be imported, by its file: importing it has side effects."""
    if module_name in sys.modules:
        return True
    package, *parts = module_name.split(".")
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    without_suffix = [str(Path(folder, *parts)) for folder in folders]
    return any(
        Path(name).is_dir() or any(Path(name + suffix).is_file() for suffix in all_suffixes())
        for name in without_suffix
    )
