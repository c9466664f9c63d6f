"""Run a callback once a module has been imported, without importing it now."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    """Delegates to the real loader, puts it back into the module, then runs the callbacks."""

    def __init__(self, inner: importlib.abc.Loader, callbacks: list[Callback]) -> None:
        self._inner = inner
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        try:
            self._inner.exec_module(module)
        except BaseException:
            # Whoever imports it may try again.
            _finder.waiting.setdefault(module.__name__, []).extend(self._callbacks)
            raise
        for callback in self._callbacks:
            callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of the modules that somebody waits for; finds nothing itself."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = callbacks
            return None
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


_finder = _Finder()


def when_imported(module_name: str, callback: Callback) -> None:
    """Call `callback(module)` right after `module_name` was imported; now, if it already was.

    A callback's exception reaches whoever imports the module.
    """
    module = sys.modules.get(module_name)
    if module is not None:
        callback(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(module_name, []).append(callback)
