"""One question to every setting: set it, serve, and something measurable changes; or the start says
why it does not."""

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters.conftest import DEEPSEEK_V3
from tests.adapters.vllm_ranks import Job, Layout, RankResult, run_all
from vllm_moe_ep.adapters.vllm import settings_report
from vllm_moe_ep.adapters.vllm.settings_report import LayerFacts, idle_settings
from vllm_moe_ep.envs import VARIABLES

MODEL = {**DEEPSEEK_V3, "num_attention_heads": 4, "num_key_value_heads": 4}
TP2, TP4, DP2 = Layout(tp=2), Layout(tp=4), Layout(dp=2, counts=(9, 4))
TESTS = Path(__file__).parent.parent


def observe(moe: Any, step: Any) -> dict[str, Any]:
    """What a step does, seen from inside: strategies, table sizes, what is gathered and held."""
    from vllm_moe_ep.layers import strategy_experts

    experts = moe.experts.routed_experts
    seen: dict[str, Any] = {"strategies": [], "tables": [], "gathered": []}
    run_experts, grouped = strategy_experts.run_experts, strategy_experts.grouped_experts
    all_gather = type(experts.collectives).all_gather

    def watch_strategy(name: str, *args: Any) -> Any:
        seen["strategies"].append(name)
        return run_experts(name, *args)

    def watch_table(tokens: Any, shard: Any, expert_capacity: int) -> Any:
        seen["tables"].append(expert_capacity)
        return grouped(tokens, shard, expert_capacity)

    def watch_gather(self: Any, rows: Tensor) -> Tensor:
        seen["gathered"].append((rows.dtype, len(rows)))
        return all_gather(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_experts, "run_experts", watch_strategy)
        patch.setattr(strategy_experts, "grouped_experts", watch_table)
        patch.setattr(type(experts.collectives), "all_gather", watch_gather)
        output = step()
    seen["norm"] = float(output.norm())
    seen["shared columns"] = moe.shared_experts.down_proj.input_size_per_partition
    seen["experts"] = experts.placement.global_ids
    return seen


@dataclass(frozen=True)
class Question:
    """`settings` against the same without `name`: `what` must differ."""

    name: str
    layout: Layout
    settings: dict[str, Any]
    what: str

    @property
    def base(self) -> dict[str, Any]:
        return {key: value for key, value in self.settings.items() if key != self.name}


QUESTIONS = (
    Question("experts", TP2, {"experts": "static"}, "strategies"),
    Question("gated_max_rows", TP2, {"experts": "static", "gated_max_rows": 4}, "strategies"),
    Question("forced_gate", TP2, {"experts": "gated", "forced_gate": "0"}, "norm"),
    Question("expert_capacity", TP2, {"experts": "grouped", "expert_capacity": 5}, "tables"),
    Question("shared_slices", TP2, {"shared_slices": False}, "shared columns"),
    Question("placement", TP2, {"placement": "linear"}, "experts"),
    Question("gather", DP2, {"gather": "fp32"}, "gathered"),
    Question("min_capacity", DP2, {"min_capacity": 64}, "gathered"),
    Question("device_size", TP4, {"device_size": 2}, "counts"),
    Question(
        "hierarchical_all_reduce",
        TP4,
        {"device_size": 2, "hierarchical_all_reduce": False},
        "counts",
    ),
)
ELSEWHERE = {
    "platform": "test_hardware.py::test_setting_overrides_what_is_found",
    "allow_stock": "adapters/test_moe_factory.py::test_allow_stock_leaves_it_and_lists_it_once",
    "cuda_path": "adapters/test_cuda_experts.py::test_a_setting_chooses_the_kernels",
    "cuda_pass_rows": "adapters/test_cuda_experts.py::test_a_setting_bounds_the_rows_of_a_pass",
}
"""What takes other hardware, or a layer that is refused: the test that answers the question."""


def test_every_setting_is_asked() -> None:
    asked = {question.name for question in QUESTIONS} | ELSEWHERE.keys()
    assert asked == {variable.name for variable in VARIABLES}
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        body = ast.parse((TESTS / file).read_text()).body
        assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}, place


def _seen(result: RankResult, what: str) -> Any:
    return result.counts if what == "counts" else result.measured[what]


@pytest.mark.parametrize("layout", [TP2, DP2, TP4], ids=["tp2", "dp2", "tp4"])
def test_setting_changes_what_a_step_does(layout: Layout) -> None:
    questions = [question for question in QUESTIONS if question.layout == layout]
    plain = Job(layout, MODEL, watch=observe)
    pairs = [(question.base, question.settings) for question in questions]
    jobs = [replace(plain, settings=settings) for pair in pairs for settings in pair]
    results = run_all(jobs)
    for number, question in enumerate(questions):
        before, after = results[2 * number], results[2 * number + 1]
        for a, b in zip(before, after, strict=True):
            seen = _seen(a, question.what), _seen(b, question.what)
            assert seen[0] != seen[1], f"{question.name}: {seen}"
            if question.name != "forced_gate":
                torch.testing.assert_close(a.output, b.output, rtol=1e-4, atol=1e-4)
        # A setting that acts is not called idle.
        idle = f"moe_ep.{question.name}) changes nothing"
        assert not [line for result in after for line in result.log if idle in line]


def test_a_setting_that_changes_nothing_is_named_at_start() -> None:
    settings = {"gated_max_rows": 4, "gather": "fp32", "device_size": 2, "cuda_pass_rows": 256}
    ((result,),) = run_all([Job(Layout(), MODEL, settings)])
    idle = [line for line in result.log if "changes nothing here" in line]
    assert [line.split()[1] for line in idle] == [
        f"VLLM_MOE_EP_{name}"
        for name in ("GATED_MAX_ROWS", "GATHER", "CUDA_PASS_ROWS", "DEVICE_SIZE")
    ]
    assert "without data parallelism no token is gathered" in idle[1]


ACTIVE = LayerFacts(
    platform="cpu",
    experts="static",
    token_size=2,
    replica_size=2,
    has_shared=True,
    why_flat=None,
    is_hierarchical=True,
    num_stock=1,
)
IDLE = {
    "allow_stock": [{"num_stock": 0}],
    "gated_max_rows": [{"experts": "dense"}, {"experts": "auto"}, {"platform": "cuda"}],
    "forced_gate": [{"platform": "cuda"}],
    "shared_slices": [{"replica_size": 1}, {"has_shared": False}],
    "expert_capacity": [{"experts": "gated"}, {"experts": "ragged"}],
    "placement": [{"replica_size": 1, "token_size": 1}],
    "gather": [{"token_size": 1}],
    "min_capacity": [{"token_size": 1}],
    "cuda_path": [{}],
    "cuda_pass_rows": [{}],
    "hierarchical_all_reduce": [{"why_flat": "too few"}, {"replica_size": 1}],
    "device_size": [{"why_flat": "too few"}, {"is_hierarchical": False}],
}
"""Facts under which a setting is idle; without an entry it always acts."""


@pytest.mark.parametrize("name", [variable.name for variable in VARIABLES])
def test_when_a_setting_is_idle(name: str) -> None:
    on_cuda = name.startswith("cuda_")
    active = replace(ACTIVE, platform="cuda") if on_cuda else ACTIVE
    assert idle_settings({name}, active) == []
    for changes in IDLE.get(name, []):
        (sentence,) = idle_settings({name}, replace(ACTIVE, **changes))  # type: ignore[arg-type]
        assert sentence.startswith(f"VLLM_MOE_EP_{name.upper()} (or moe_ep.{name}) changes nothing")
        assert sentence.endswith(".")
    assert idle_settings(set(), replace(ACTIVE, num_stock=0, token_size=1)) == []


def test_every_setting_has_a_rule_in_the_order_of_the_registry() -> None:
    assert list(settings_report._RULES) == [variable.name for variable in VARIABLES]
