"""The static strategies trace as one graph; the graph is the same on every rank."""

from collections.abc import Callable, Iterator

import pytest
import torch
from layer_factory import config_of, layer_of, linears_of
from oracle import REL_L2_LIMIT, Fixture, make_fixture, rel_l2
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import _config as symbolic_shapes_config

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.static_ep import StaticEPLayer
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


def _step_of(layer: StaticEPLayer) -> Step:
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


class _Module(torch.nn.Module):
    def __init__(self, layer: StaticEPLayer) -> None:
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
        layer = StaticEPLayer(
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
