"""Most memory that a step takes at one time, by torch's own record of every allocation."""

from collections.abc import Callable

import pytest
import torch
from layer_factory import STRATEGIES, config_of, layer_of, local_of
from oracle import make_fixture
from quantised_factory import ACTIVATIONS, WEIGHTS, experts_of, make_quantised
from torch.autograd.profiler import profile

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.shared_expert import SharedExpert
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.quant.formats import QuantFormat

NUM_ROWS, HIDDEN, WIDTH, NUM_EXPERTS = 1024, 512, 256, 4
# rows x (2I + 2H) in fp32, and gate and up of one expert.
LIMIT = 4 * NUM_ROWS * (2 * WIDTH + 2 * HIDDEN) + 4 * 2 * WIDTH * HIDDEN
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _peak_bytes(call: Callable[[], object]) -> int:
    """Allocated at most at one time while the call runs, inside of operators too."""
    with profile(profile_memory=True) as record:
        kept = call()
    events = [event for event in record.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert kept is not None
    return peak


def test_the_record_sees_what_operators_hold_inside() -> None:
    rows = torch.zeros(1000, 8)
    assert 32_000 + 64_000 <= _peak_bytes(lambda: (rows + 1).double().float().sum()) < 130_000
    op = torch.ops.vllm_moe_ep_kernels.quantise_dequantise
    assert _peak_bytes(lambda: op(rows, (1, 8), 448.0, True, False)) > 2 * 32_000


def _check(layer: EPLayer, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):  # type: ignore[no-untyped-def]
    def step() -> torch.Tensor:
        return layer(rows, ids, weights, capacity=NUM_ROWS)

    step()
    peak = _peak_bytes(step)
    assert 4 * NUM_ROWS * HIDDEN <= peak <= LIMIT, f"{peak / LIMIT:.2f} of the limit"


def _config(strategy: str) -> EPConfig:
    """The largest table that is not dense."""
    return EPConfig(experts=strategy, expert_capacity=NUM_ROWS - 1)


@each_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_float_experts(strategy: str, dtype: torch.dtype, limit: float | None) -> None:
    fixture = make_fixture(dtype, NUM_ROWS, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    # The busiest expert has nearly every row.
    fixture.topk_ids[1:, 0] = 0
    fixture.topk_ids[0] = -1
    layer = layer_of(fixture, _config(strategy), limit=limit, max_num_tokens=NUM_ROWS)
    _check(layer, fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)


@each_strategy
@pytest.mark.parametrize("fmt", [WEIGHTS[0], WEIGHTS[-1]], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(
    "activation", [None, ACTIVATIONS[3]], ids=lambda fmt: fmt.name if fmt else "-"
)
def test_quantised_experts(strategy: str, fmt: QuantFormat, activation: QuantFormat | None) -> None:
    quantised = make_quantised(fmt, NUM_ROWS, torch.bfloat16, HIDDEN, WIDTH, NUM_EXPERTS)
    floats = quantised.floats
    floats.topk_ids[0] = -1
    layer = strategy_layer(
        config_of(floats, max_num_tokens=NUM_ROWS),
        local_of(floats, 1, 0),
        experts_of(quantised, list(range(NUM_EXPERTS)), activation),
        SingleProcess(),
        _config(strategy),
    )
    _check(layer, floats.hidden_states, floats.topk_ids, floats.topk_weights)


@each_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "width", "shared_width"),
    [(1024, 1024, 128, 128), (2048, 256, 1024, 2048), (1024, 512, 256, 256)],
)
def test_whole_step_with_a_shared_expert(
    strategy: str, dtype: torch.dtype, num_rows: int, hidden: int, width: int, shared_width: int
) -> None:
    """Sizes at which copies of the sum, or all rows of the shared expert at once, are too much."""
    fixture = make_fixture(dtype, num_rows, hidden, width, NUM_EXPERTS, 2)
    fixture.topk_ids[1:, 0] = 0
    shared = SharedExpert(
        (torch.randn(2 * shared_width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(hidden, shared_width) / shared_width**0.5).to(dtype),
    )
    ep_config = EPConfig(experts=strategy, expert_capacity=num_rows // 2)
    layer = layer_of(fixture, ep_config, max_num_tokens=num_rows)
    if strategy == "grouped":
        # Without the rerun, which is the dense step.
        fixture.topk_ids[num_rows // 2 :, 0] = 1
    rows = fixture.hidden_states, fixture.topk_ids, fixture.topk_weights

    def step() -> torch.Tensor:
        return layer(*rows, capacity=num_rows, shared=shared)

    step()
    limit = 4 * num_rows * (2 * width + 2 * hidden) + 4 * 2 * max(width, shared_width) * hidden
    peak = _peak_bytes(step)
    assert 4 * num_rows * hidden <= peak <= limit, f"{peak / limit:.2f} of the limit"
