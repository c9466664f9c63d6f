"""Layers with quantised experts trace as one graph, the same on every rank."""

from collections.abc import Callable, Iterator

import pytest
import torch
from layer_factory import config_of
from quantised_factory import QuantisedFixture, experts_of, make_quantised
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import _config as symbolic_shapes_config

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.quant.formats import FP4_1X32, FP8_1X32_UE8M0, FP8_128X128, QuantFormat

each_strategy = pytest.mark.parametrize("strategy", ["dense", "gated", "grouped"])
each_format = pytest.mark.parametrize(
    ("fmt", "activation"),
    [(FP8_128X128, None), (FP4_1X32, FP8_1X32_UE8M0)],
    ids=["fp8", "fp4-cast-activations"],
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _fixture(fmt: QuantFormat, num_tokens: int) -> QuantisedFixture:
    return make_quantised(fmt, num_tokens, hidden_size=64, moe_intermediate_size=32, num_experts=4)


def _layer(
    fixture: QuantisedFixture,
    strategy: str,
    activation: QuantFormat | None,
    global_ids: tuple[int, ...],
) -> EPLayer:
    """Two or more slots; those past the local experts are unused."""
    slots = [*global_ids, *[0] * (2 - len(global_ids))]
    return strategy_layer(
        config_of(fixture.floats),
        LocalExperts(4, global_ids),
        experts_of(fixture, slots, activation),
        SingleProcess(),
        EPConfig(host_mode=False, experts=strategy, expert_capacity=3),
    )


def _step_of(layer: EPLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def step(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        capacity = hidden_states.shape[0]
        return layer.step(hidden_states, topk_ids, topk_weights, capacity=capacity).hidden_states

    return step


def _arguments(fixture: QuantisedFixture) -> tuple[Tensor, Tensor, Tensor]:
    floats = fixture.floats
    return floats.hidden_states, floats.topk_ids, floats.topk_weights


@each_strategy
@each_format
def test_one_graph_serves_every_size(
    strategy: str, fmt: QuantFormat, activation: QuantFormat | None
) -> None:
    eager = _step_of(_layer(_fixture(fmt, 8), strategy, activation, (0, 1, 2, 3)))
    counter = CompileCounter()
    with symbolic_shapes_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=counter)
        for num_tokens in (0, 1, 2, 7, 65):
            arguments = _arguments(_fixture(fmt, num_tokens))
            assert torch.equal(compiled(*arguments), eager(*arguments))
    # "grouped" runs dense up to its capacity, as a second graph.
    assert counter.frame_count == (2 if strategy == "grouped" else 1)


@each_strategy
@each_format
def test_lowered_code_equals_eager(
    strategy: str, fmt: QuantFormat, activation: QuantFormat | None
) -> None:
    fixture = _fixture(fmt, 8)
    eager = _step_of(_layer(fixture, strategy, activation, (0, 1, 2, 3)))
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*_arguments(fixture)), eager(*_arguments(fixture)))


class _Module(torch.nn.Module):
    def __init__(self, layer: EPLayer) -> None:
        super().__init__()
        self.step = _step_of(layer)

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return self.step(hidden_states, topk_ids, topk_weights)


@each_strategy
@each_format
def test_every_rank_exports_the_same_graph(
    strategy: str, fmt: QuantFormat, activation: QuantFormat | None
) -> None:
    fixture = _fixture(fmt, 8)
    codes = set()
    for global_ids in ((0, 1), (2, 3), (3,)):
        module = _Module(_layer(fixture, strategy, activation, global_ids))
        program = torch.export.export(module, _arguments(fixture))
        assert torch.equal(program.module()(*_arguments(fixture)), module(*_arguments(fixture)))
        codes.add(program.graph_module.code)
    assert len(codes) == 1
