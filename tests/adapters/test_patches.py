"""`docs/patches.md` lists every attribute of vLLM that the plugin changes, and nothing else."""

import ast
import importlib
import re
from pathlib import Path

from vllm_moe_ep.adapters.vllm import plugin, plugin_filter, wrapping

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


def hooked() -> dict[str, set[str]]:
    """Module of ours -> dotted names that the plugin's tables say it wraps or changes."""
    found: dict[str, set[str]] = {}
    for hook in (*plugin.HOOKS, *plugin.NEURON_HOOKS, *plugin.CURE_HOOKS, *plugin_filter.HOOKS):
        if hook.kind != "need":
            module = f"{hook.function.partition('.')[0]}.py"
            found.setdefault(module, set()).add(hook.target)
    return found


def test_the_document_lists_every_hook_and_nothing_else() -> None:
    assert ledger() == hooked()


def test_nothing_is_wrapped_outside_of_the_tables() -> None:
    callers = {
        path.name
        for path in ADAPTER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "wrap_attribute"
    }
    assert callers == {"hooks.py"}


def test_every_hook_is_in_place() -> None:
    for hook in (*plugin.HOOKS, *plugin.CURE_HOOKS):
        importlib.import_module(hook.module)
        if hook.kind == "wrap":
            assert hasattr(getattr(hook.find_owner(), hook.attribute), wrapping.MARK), hook.target
