"""`docs/patches.md` lists every attribute of vLLM that the adapter wraps, and nothing else."""

import ast
import importlib
import re
from pathlib import Path

from vllm_moe_ep.adapters.vllm import wrapping

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "vllm_moe_ep" / "adapters" / "vllm"


def ledger() -> dict[str, set[str]]:
    """Module of ours -> dotted names that the table says it hooks."""
    hooked: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "patches.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            module = cells[1].strip("`")
            hooked.setdefault(module, set()).update(re.findall(r"`(vllm[\w.]+)`", cells[0]))
    return hooked


def wrapped_names() -> dict[str, set[str]]:
    """Module of ours -> attribute names in its calls of `wrap_attribute`."""
    found: dict[str, set[str]] = {}
    for path in ADAPTER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "wrap_attribute":
                name = node.args[1]
                assert isinstance(name, ast.Constant)
                found.setdefault(path.name, set()).add(str(name.value))
    return found


def test_every_wrapped_attribute_is_listed() -> None:
    listed = ledger()
    for module, names in wrapped_names().items():
        last_parts = {target.rpartition(".")[2] for target in listed[module]}
        assert names <= last_parts, f"{module} wraps {names}, docs/patches.md lists {last_parts}"


def test_every_listed_module_exists() -> None:
    assert all((ADAPTER / module).is_file() for module in ledger())


def test_every_listed_wrap_is_in_place() -> None:
    wraps = wrapped_names()
    for module, targets in ledger().items():
        if module in ("plugin_filter.py", "neuron_model.py"):
            continue  # installed only while VLLM_PLUGINS leaves us out, or with vllm-neuron
        for target in targets:
            owner_name, _, attribute = target.rpartition(".")
            if attribute in wraps.get(module, set()):
                assert hasattr(getattr(_resolve(owner_name), attribute), wrapping.MARK), target


def _resolve(dotted: str) -> object:
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        parent, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(parent), name)
