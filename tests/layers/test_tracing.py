"""The static strategies trace as one graph; the graph is the same on every rank."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from layer_factory import config_of, layer_of, linears_of
from oracle import REL_L2_LIMIT, Fixture, make_fixture, rel_l2
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import _config as symbolic_shapes_config

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.regions import (
    AFTER_COMBINE,
    BEFORE_COMBINE,
    BEFORE_EXPERTS,
    no_split,
)
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import LocalExperts

STATIC = ["dense", "gated", "grouped"]
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _fixture(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Fixture:
    return make_fixture(
        dtype, num_tokens, hidden_size=32, moe_intermediate_size=16, num_experts=4, top_k=2
    )


def _step_of(layer: EPLayer) -> Step:
    def step(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        capacity = hidden_states.shape[0]
        shared = hidden_states * 0.5
        arguments = (hidden_states, topk_ids, topk_weights)
        return layer.step(*arguments, capacity=capacity, shared=shared).hidden_states

    return step


def _config(strategy: str) -> EPConfig:
    return EPConfig(host_mode=False, experts=strategy, expert_capacity=3)


@pytest.mark.parametrize("strategy", STATIC)
def test_one_graph_serves_every_size(strategy: str) -> None:
    """With sizes kept symbolic, as engines compile, one compilation does for all of them."""
    eager = _step_of(layer_of(_fixture(64), _config(strategy)))
    counter = CompileCounter()
    with symbolic_shapes_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
        for num_tokens in (0, 1, 2, 7, 64, 65):
            fresh = _fixture(num_tokens)
            arguments = (fresh.hidden_states, fresh.topk_ids, fresh.topk_weights)
            assert torch.equal(compiled(*arguments), eager(*arguments))
    # "grouped" runs dense up to its capacity, as a second graph.
    assert counter.frame_count == (2 if strategy == "grouped" else 1)


class _TwoAlike(SingleProcess):
    """A token group of two ranks that hold the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token_size = 2

    def all_gather(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, rows])

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        return rows[: rows.shape[0] // 2]


@pytest.mark.parametrize("path", ["bytes", "fp32"])
def test_one_graph_serves_every_number_of_local_rows(path: str) -> None:
    """A capacity is compiled once, however many of its rows this rank holds."""
    fixture = _fixture(8)
    layer = layer_of(fixture, replace(_config("dense"), gather=path), collectives=_TwoAlike())

    def step(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return layer.step(rows, ids, weights, capacity=8).hidden_states

    counter = CompileCounter()
    with symbolic_shapes_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
        for num_tokens in (5, 0, 1, 2, 8):
            own = {"w13_weight": fixture.w13_weight[:2], "w2_weight": fixture.w2_weight[:2]}
            fresh = replace(_fixture(num_tokens), **own)
            fresh.topk_ids[:, 0] = 1
            actual = compiled(fresh.hidden_states, fresh.topk_ids, fresh.topk_weights)
            if num_tokens:
                assert rel_l2(actual, fresh.routed()) <= REL_L2_LIMIT[torch.bfloat16]
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [("dense", "inductor"), ("gated", "aot_eager"), ("grouped", "aot_eager")],
)
def test_compiled_code_equals_eager(strategy: str, backend: str) -> None:
    fixture = _fixture(64)
    eager = _step_of(layer_of(fixture, _config(strategy)))
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=backend)
    arguments = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
    actual, expected = compiled(*arguments), eager(*arguments)
    assert rel_l2(actual, expected) <= REL_L2_LIMIT[torch.bfloat16]


@pytest.mark.parametrize("strategy", STATIC)
def test_steps_of_one_capacity_do_not_recompile(strategy: str) -> None:
    """Padded to the capacity, with the real rows marked: one shape, whatever was routed."""
    fixture = _fixture(8)
    layer = layer_of(fixture, _config(strategy))

    def step(rows: Tensor, ids: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
        return layer.step(rows, ids, weights, capacity=8, valid=valid).hidden_states

    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend=counter)
    for num_tokens in (8, 0, 1, 5):
        weights = {"w13_weight": fixture.w13_weight, "w2_weight": fixture.w2_weight}
        fresh = replace(_fixture(8), **weights)
        if num_tokens == 5:
            fresh.topk_ids[:] = 2
        valid = torch.arange(8) < num_tokens
        actual = compiled(fresh.hidden_states, fresh.topk_ids, fresh.topk_weights, valid)
        assert torch.equal(actual[num_tokens:], torch.zeros(8 - num_tokens, 32))
        if strategy != "grouped":
            error = rel_l2(actual[:num_tokens], fresh.routed()[:num_tokens])
            assert error <= REL_L2_LIMIT[torch.bfloat16]
    assert counter.frame_count == 1


def _record_graphs(graphs: list[str]) -> Callable[..., object]:
    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph.code)
        return graph.forward

    return backend


def test_a_step_splits_at_its_boundaries_only() -> None:
    """The experts' products are alone in their region; unsplit, the step is one graph."""
    fixture = _fixture(8)
    arguments = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
    names: list[str] = []

    def split(name: str) -> None:
        names.append(name)
        torch._dynamo.graph_break()

    layer = layer_of(fixture, _config("gated"))
    for boundary, num_regions in ((no_split, 1), (split, 4)):
        torch._dynamo.reset()
        layer.boundary = boundary
        graphs: list[str] = []
        compiled = torch.compile(_step_of(layer), dynamic=False, backend=_record_graphs(graphs))
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            actual = compiled(*arguments)
        assert rel_l2(actual, fixture.routed() + 0.5 * fixture.hidden_states.double()) <= 1e-2
        assert len(graphs) == num_regions, "\n".join(graphs)
        assert sum("gated_linear" in graph for graph in graphs) == 1
    assert names == [BEFORE_EXPERTS, BEFORE_COMBINE, AFTER_COMBINE]


class _Module(torch.nn.Module):
    def __init__(self, layer: EPLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.layer.step(hidden_states, topk_ids, topk_weights, capacity=8).hidden_states


@pytest.mark.parametrize("strategy", STATIC)
def test_every_rank_exports_the_same_graph(strategy: str) -> None:
    """Ranks own different experts, and the last one fewer than it has slots."""
    fixture = _fixture(8)
    codes = set()
    for global_ids in ((0, 1), (2, 3), (3,)):
        local = LocalExperts(4, global_ids)
        slots = LocalExperts(4, (global_ids + (0,))[:2])
        layer = strategy_layer(
            config_of(fixture),
            local,
            linears_of(fixture, slots),
            SingleProcess(),
            _config(strategy),
        )
        arguments = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
        program = torch.export.export(_Module(layer), arguments)
        assert torch.equal(program.module()(*arguments), _Module(layer)(*arguments))
        codes.add(program.graph_module.code)
    assert len(codes) == 1
