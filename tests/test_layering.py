"""Who may import whom, and who may read the environment, from the syntax trees."""

import ast
import re
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEVELS = {
    "vllm_moe_ep.errors": 0,
    "vllm_moe_ep.envs": 0,
    "vllm_moe_ep.cuda_devices": 1,
    "vllm_moe_ep.hardware": 1,
    "vllm_moe_ep.config": 1,
    "vllm_moe_ep.stages": 1,
    "vllm_moe_ep.quant.formats": 1,
    "vllm_moe_ep.quant": 2,
    "vllm_moe_ep.placement": 2,
    "vllm_moe_ep.collectives": 2,
    "vllm_moe_ep.device_groups": 2,
    "vllm_moe_ep.rank_group": 2,
    "vllm_moe_ep_kernels": 2,
    "vllm_moe_ep.deepgemm": 2,
    "vllm_moe_ep.layers": 3,
    "vllm_moe_ep.adapters": 4,
    "vllm_moe_ep.bench": 4,
    "vllm_moe_ep.cli": 4,
    "vllm_moe_ep.demo": 4,
    "vllm_moe_ep.plan": 4,
    "vllm_moe_ep.make_model": 4,
}
# The package's own module holds names that all levels use, and imports the adapters on demand.
PACKAGE = "vllm_moe_ep"
REFERENCE = "vllm_moe_ep_kernels.reference"
ENVIRONMENT_READERS = {
    "vllm_moe_ep/envs.py": "the registry of settings",
    "vllm_moe_ep/cuda_devices.py": "reads CUDA_VISIBLE_DEVICES, as CUDA does",
    "vllm_moe_ep/deepgemm/library.py": "sets CUDA_HOME and the kernel cache for deep_gemm",
    "vllm_moe_ep/cli/doctor.py": "shows VLLM_PLUGINS and asks as the layer would",
    "vllm_moe_ep/demo/cli.py": "finds the user's cache folder",
    "vllm_moe_ep/demo/server.py": "hands its environment on to the server it starts",
    "vllm_moe_ep/adapters/vllm/environment.py": "declares the settings to vLLM's own registry",
    "vllm_moe_ep/adapters/vllm/plugin_filter.py": "reads VLLM_PLUGINS, which is vLLM's",
}
# Names within vllm that other files than its adapter may hold.
NAMED_VLLM_MODULES = {
    # A library of its own inside vLLM's wheel, whose import needs nothing of vLLM's API.
    "vllm_moe_ep/deepgemm/sources.py": {"vllm.third_party.deep_gemm"},
    # The entry point group of plugins, no module.
    "vllm_moe_ep/cli/doctor.py": {"vllm.general_plugins"},
}


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    _module_name(path): path
    for folder in ("vllm_moe_ep", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
each_module = pytest.mark.parametrize("module", sorted(SOURCES))


def _tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def _imports(module: str, nodes: Iterable[ast.AST]) -> set[str]:
    """Full names of imported modules; ``from package import module`` counts as the module."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = ".".join(filter(None, [_parent(module, node.level), node.module]))
            submodules = {f"{source}.{alias.name}" for alias in node.names} & SOURCES.keys()
            names.update(submodules or {source})
    return names


def _parent(module: str, level: int) -> str:
    """The package that ``level`` leading dots mean in ``module``; empty for none."""
    if level == 0:
        return ""
    parts = module.split(".")
    is_package = SOURCES[module].name == "__init__.py"
    return ".".join(parts[: len(parts) - level + is_package])


def _all_imports(module: str) -> set[str]:
    return _imports(module, ast.walk(_tree(module)))


def _imports_at_load_time(module: str) -> set[str]:
    return _imports(module, _tree(module).body)


def _level(module: str) -> int | None:
    parts = module.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((LEVELS[prefix] for prefix in prefixes if prefix in LEVELS), None)


def test_sources_were_found() -> None:
    some = {PACKAGE, "vllm_moe_ep.layers.ep_layer", "vllm_moe_ep_kernels.host.linear"}
    assert some <= SOURCES.keys()


@each_module
def test_no_import_points_upward(module: str) -> None:
    if module == PACKAGE:
        return
    level = _level(module)
    assert level is not None, f"{module} has no level: add it to LEVELS"
    for imported in _all_imports(module):
        imported_level = _level(imported)
        assert imported_level is None or imported_level <= level, f"{module} imports {imported}"


def test_the_package_itself_imports_the_standard_library_only() -> None:
    for name in _imports_at_load_time(PACKAGE):
        assert name.split(".")[0] in sys.stdlib_module_names, name


def test_imports_at_load_time_have_no_cycle() -> None:
    graph = {
        module: _imports_at_load_time(module) & SOURCES.keys() - {PACKAGE, module}
        for module in SOURCES
    }
    list(TopologicalSorter(graph).static_order())


@each_module
def test_vllm_is_imported_by_its_adapter_only(module: str) -> None:
    if module.startswith("vllm_moe_ep.adapters.vllm"):
        return
    roots = {name.split(".")[0] for name in _all_imports(module)}
    assert "vllm" not in roots


def _names_within(package: str, module: str) -> set[str]:
    """Strings of `module` that are dotted names within `package`."""
    pattern = re.compile(rf"{package}(\.\w+)+")
    strings = (node.value for node in ast.walk(_tree(module)) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and pattern.fullmatch(text)}


def test_vllm_modules_are_named_for_import_only_where_listed() -> None:
    """An import by name, importlib.import_module("vllm.x"), is one the test above cannot see."""
    named = {
        str(SOURCES[module].relative_to(ROOT)): names
        for module in SOURCES
        if not module.startswith("vllm_moe_ep.adapters.vllm")
        and (names := _names_within("vllm", module))
    }
    assert named == NAMED_VLLM_MODULES


@each_module
def test_kernels_do_not_import_the_package(module: str) -> None:
    if not module.startswith("vllm_moe_ep_kernels"):
        return
    roots = {name.split(".")[0] for name in _all_imports(module)}
    assert PACKAGE not in roots
    if module.startswith(REFERENCE):
        others = {name for name in _all_imports(module) if not name.startswith(REFERENCE)}
        assert {name.split(".")[0] for name in others} <= {"torch", "dataclasses"}


def _reads_environment(tree: ast.Module) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and names & {alias.name for alias in node.names})
        for node in ast.walk(tree)
    )


def test_only_listed_files_read_the_environment() -> None:
    readers = {
        str(SOURCES[module].relative_to(ROOT))
        for module in SOURCES
        if _reads_environment(_tree(module))
    }
    assert readers == set(ENVIRONMENT_READERS)
