"""The whole step with its collectives as one graph, in real gloo processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from layer_factory import config_of
from oracle import Fixture, rel_l2, shared_expert
from process_pool import ProcessPool, Worker
from quantised_factory import QuantisedFixture, cast_of, experts_of, make_quantised
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.device_groups import DeviceGroups, make_device_groups
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.shared_expert import SharedExpert, prepare_shared
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement
from vllm_moe_ep.quant.formats import FP8_1X128, FP8_128X128, QuantFormat

CAPACITY = 8


@dataclass(frozen=True)
class Case:
    """A way to run the layer. Each of the token ranks brings CAPACITY rows, some of them padding.

    Attributes:
        layout: token ranks and replicas.
        options: fields of EPConfig.
        activation: what rows are cast to, or None.
        with_device_groups: all-reduce in two steps, on four replicas.
    """

    layout: tuple[int, int]
    options: dict[str, Any]
    activation: QuantFormat | None = None
    with_device_groups: bool = False


CASES = {
    "gated, bytes": Case((4, 1), {"experts": "gated"}),
    "gated, cast rows": Case((2, 2), {"experts": "gated"}, FP8_1X128),
    "dense, fp32": Case((2, 2), {"experts": "dense", "gather": "fp32"}),
    "grouped, max": Case((2, 2), {"experts": "grouped", "expert_capacity": 12}),
    "grouped, flag row": Case((1, 4), {"experts": "grouped", "expert_capacity": 7}),
    "hierarchical": Case((1, 4), {"experts": "gated"}, None, True),
    "auto": Case((1, 3), {}),
}


class Step(torch.nn.Module):
    """Routed experts of one rank, and a shared expert of which it computes its part."""

    def __init__(self, layer: EPLayer, shared: SharedExpert) -> None:
        super().__init__()
        self.layer = layer
        self.shared = prepare_shared(shared, layer.collectives)

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor, valid: Tensor) -> Any:
        result = self.layer.step(
            rows,
            ids,
            weights,
            capacity=CAPACITY,
            valid=valid,
            shared=self.shared,
            shared_is_partial=self.shared.is_partial,
        )
        return result.hidden_states, result.overflow


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPool]:
    """A pool of its own: ranks number groups alike only if they have built the same layers."""
    pool = ProcessPool(4)
    yield pool
    pool.close()


@cache
def _device_groups() -> DeviceGroups:
    world = torch.distributed.group.WORLD
    assert world is not None
    return make_device_groups(world, 2)


def _step(worker: Worker, case: Case, fixture: QuantisedFixture, shared: SharedExpert) -> Step:
    groups = worker.layouts[case.layout]
    device_groups = _device_groups() if case.with_device_groups else None
    ours = TorchDistributed(groups.token_group, groups.replica_group, None, device_groups)
    ep_rank = ours.token_rank * ours.replica_size + ours.replica_rank
    local = ExpertPlacement.linear(16, case.layout[0] * case.layout[1]).local(ep_rank)
    # With three ranks the last two own one expert less: unused slots make up for it.
    num_slots = -(-16 // (case.layout[0] * case.layout[1]))
    slots = [*local.global_ids, *[0] * (num_slots - local.num_local_experts)]
    linears = experts_of(fixture, slots, case.activation)
    ep_config = EPConfig(host_mode=False, **case.options)
    layer = strategy_layer(config_of(fixture.floats), local, linears, ours, ep_config)
    return Step(layer, shared)


def _arguments(worker: Worker, case: Case, fixture: Fixture, valid: Tensor) -> tuple[Tensor, ...]:
    token_rank = worker.rank // case.layout[1]
    parts = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights, valid)
    return tuple(part.split(CAPACITY)[token_rank] for part in parts)


def exported(
    worker: Worker, case: Case, fixture: QuantisedFixture, shared: SharedExpert, valid: Tensor
) -> dict[str, Any]:
    step = _step(worker, case, fixture, shared)
    arguments = _arguments(worker, case, fixture.floats, valid)
    program = torch.export.export(step, arguments)
    shapes = [
        node.meta["val"].shape
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
    ]
    return {
        "output": program.module()(*arguments)[0],
        "eager": step(*arguments)[0],
        "code": program.graph_module.code,
        "is_static": all(type(size) is int for shape in shapes for size in shape),
    }


def _make(case: Case) -> tuple[QuantisedFixture, SharedExpert, Tensor]:
    num_rows = CAPACITY * case.layout[0]
    fixture = make_quantised(FP8_128X128, num_rows, hidden_size=64, moe_intermediate_size=32)
    w13 = (torch.randn(2 * 256, 64) / 8).bfloat16()
    shared = SharedExpert(w13, (torch.randn(64, 256) / 16).bfloat16())
    valid = torch.rand(num_rows) < 0.7
    # No expert overflows: it has at most all rows but one.
    valid[0] = False
    return fixture, shared, valid


def _expected(
    case: Case, fixture: QuantisedFixture, shared: SharedExpert, valid: Tensor
) -> tuple[Tensor, ...]:
    routed = fixture.floats.routed(cast=cast_of(case.activation))
    rows = fixture.floats.hidden_states
    assert isinstance(shared.w13_weight, Tensor) and isinstance(shared.w2_weight, Tensor)
    added = shared_expert(rows, shared.w13_weight, shared.w2_weight)
    return (torch.where(valid[:, None], routed, 0.0) + added).split(CAPACITY)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_rank_exports_the_same_static_graph(processes: ProcessPool, case: Case) -> None:
    fixture, shared, valid = _make(case)
    if case.options.get("expert_capacity") == 12:
        fixture.floats.topk_ids[CAPACITY - 3 : CAPACITY + 1] = -1
    num_ranks = case.layout[0] * case.layout[1]
    results = processes.run(exported, num_ranks, case, fixture, shared, valid)
    expected = _expected(case, fixture, shared, valid)
    for rank, result in enumerate(results):
        assert rel_l2(result["output"], expected[rank // case.layout[1]]) <= 1e-2
        assert torch.equal(result["output"], result["eager"])
        assert result["is_static"]
        assert result["code"] == results[0]["code"]
    assert "vllm_moe_ep." in results[0]["code"]


def compiled_steps(
    worker: Worker,
    case: Case,
    fixture: QuantisedFixture,
    shared: SharedExpert,
    valids: list[Tensor],
) -> tuple[list[Tensor], int]:
    torch._dynamo.reset()
    num_graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    step = _step(worker, case, fixture, shared)
    compiled = torch.compile(step, fullgraph=True, backend=count)
    arguments = [_arguments(worker, case, fixture.floats, valid) for valid in valids]
    return [compiled(*each)[0] for each in arguments], num_graphs


@pytest.mark.parametrize("name", ["gated, cast rows", "grouped, flag row", "hierarchical"])
def test_steps_of_one_capacity_share_one_graph(processes: ProcessPool, name: str) -> None:
    case = CASES[name]
    fixture, shared, valid = _make(case)
    nothing = torch.zeros_like(valid)
    uneven = valid.clone()
    uneven[: len(valid) // 2] = False
    valids = [valid, nothing, uneven]
    num_ranks = case.layout[0] * case.layout[1]
    results = processes.run(compiled_steps, num_ranks, case, fixture, shared, valids)
    for rank, (outputs, num_graphs) in enumerate(results):
        assert num_graphs == 1
        for output, each in zip(outputs, valids, strict=True):
            expected = _expected(case, fixture, shared, each)[rank // case.layout[1]]
            assert rel_l2(output, expected) <= 1e-2
