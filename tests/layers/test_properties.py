"""The whole layer on 1 to 8 simulated ranks, over shapes, formats and kinds of routing."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_factory import STRATEGIES, config_of, linears_of
from oracle import REL_L2_LIMIT, Fixture, make_fixture, shared_expert
from quantised_factory import ACTIVATIONS, WEIGHTS, cast_of, experts_of, make_quantised
from simulated_ranks import SimulatedRank, run_ranks
from torch import Tensor

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.expert_weights import ExpertLinears
from vllm_moe_ep.layers.shared_expert import SharedExpert, prepare_shared
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement
from vllm_moe_ep.quant.formats import QuantFormat

ROUTINGS = ("random", "one expert", "last expert", "nothing", "repeated", "skewed", "out of range")


@dataclass(frozen=True)
class Shape:
    """Sizes of one example; ``counts`` are the rows of each token rank."""

    counts: list[int]
    replica_size: int
    num_experts: int
    top_k: int
    hidden_size: int
    width: int
    spare_capacity: int
    round_robin: bool
    seed: int


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    token_size = draw(st.integers(1, 8))
    num_experts = draw(st.integers(1, 20))
    return Shape(
        counts=draw(st.lists(st.integers(0, 6), min_size=token_size, max_size=token_size)),
        replica_size=draw(st.integers(1, 8 // token_size)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(8, num_experts))),
        hidden_size=2 * draw(st.integers(8, 40)),
        width=2 * draw(st.integers(8, 40)),
        spare_capacity=draw(st.integers(0, 3)),
        round_robin=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def _route(fixture: Fixture, routing: str) -> None:
    ids, num_experts = fixture.topk_ids, len(fixture.w2_weight)
    if routing == "one expert":
        ids[:] = num_experts // 2
    elif routing == "last expert":
        ids[:] = -1
        ids[:, -1] = num_experts - 1
    elif routing == "nothing":
        ids[:] = -1
    elif routing == "repeated":
        ids[:] = ids[:, :1]
    elif routing == "skewed":
        ids.copy_((torch.rand(ids.shape) ** 6 * num_experts).int())
    elif routing == "out of range":
        ids[torch.rand(ids.shape) < 0.5] = num_experts
        ids[torch.rand(ids.shape) < 0.2] = -7
    is_nothing = (ids < 0) | (ids >= num_experts)
    fixture.topk_weights[is_nothing] = torch.nan


def _drop_repeats(fixture: Fixture) -> None:
    """Ragged experts cast a repeated id's pairs one by one: within the format's error of one cast
    of their sum, but not within the limit here."""
    ids = fixture.topk_ids
    for slot in range(1, ids.shape[1]):
        ids[(ids[:, :slot] == ids[:, slot : slot + 1]).any(dim=1), slot] = -1


def _run(shape: Shape, fixture: Fixture, linears: Any, ep_config: EPConfig) -> list[Tensor]:
    """Outputs by rank, with a shared expert of which replicas take slices where they can."""
    num_ranks = len(shape.counts) * shape.replica_size
    place = ExpertPlacement.round_robin if shape.round_robin else ExpertPlacement.linear
    placement = place(shape.num_experts, num_ranks)
    capacity = max(shape.counts) + shape.spare_capacity
    parts = [
        part.split(shape.counts)
        for part in (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
    ]
    whole = _shared(fixture)

    def step(ours: SimulatedRank) -> tuple[Tensor, Counter[str]]:
        local = placement.local(ours.token_rank * ours.replica_size + ours.replica_rank)
        weights: ExpertLinears = linears(local)
        layer = strategy_layer(config_of(fixture), local, weights, ours, ep_config)
        shared = prepare_shared(whole, ours)
        rows = [part[ours.token_rank] for part in parts]
        output = layer(*rows, capacity=capacity, shared=shared, shared_is_partial=shared.is_partial)
        return output, ours.counts

    results = run_ranks(len(shape.counts), shape.replica_size, step)
    assert all(counts == results[0][1] for _, counts in results)
    return [output for output, _ in results]


def _shared(fixture: Fixture) -> SharedExpert:
    generator = torch.Generator().manual_seed(1)
    hidden_size = fixture.hidden_states.shape[1]
    w13 = torch.randn(256, hidden_size, generator=generator) / hidden_size**0.5
    w2 = torch.randn(hidden_size, 128, generator=generator) / 128**0.5
    return SharedExpert(w13.to(fixture.dtype), w2.to(fixture.dtype))


def _check(
    shape: Shape, fixture: Fixture, outputs: list[Tensor], routed: Tensor, limit: float
) -> None:
    """The error against the output's own size."""
    whole = _shared(fixture)
    assert isinstance(whole.w13_weight, Tensor) and isinstance(whole.w2_weight, Tensor)
    added = shared_expert(fixture.hidden_states, whole.w13_weight, whole.w2_weight)
    size = (routed + added).norm()
    for replica in range(shape.replica_size):
        together = torch.cat(outputs[replica :: shape.replica_size])
        assert (together.shape, together.dtype) == (routed.shape, fixture.dtype)
        error = (together.double() - routed - added).norm()
        assert error <= limit * size, f"{error / size:.3g} exceeds {limit}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes(),
    routing=st.sampled_from(ROUTINGS),
    gather=st.sampled_from(["bytes", "fp32"]),
    expert_capacity=st.integers(0, 12),
)
def test_float_experts(
    strategy: str,
    dtype: torch.dtype,
    shape: Shape,
    routing: str,
    gather: str,
    expert_capacity: int,
) -> None:
    torch.manual_seed(shape.seed)
    sizes = (shape.hidden_size, shape.width, shape.num_experts, shape.top_k)
    fixture = make_fixture(dtype, sum(shape.counts), *sizes)
    _route(fixture, routing)
    ep_config = EPConfig(experts=strategy, gather=gather, expert_capacity=expert_capacity)
    outputs = _run(shape, fixture, lambda local: linears_of(fixture, local), ep_config)
    _check(shape, fixture, outputs, fixture.routed(), REL_L2_LIMIT[dtype])


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=shapes(),
    routing=st.sampled_from(ROUTINGS),
    fmt=st.sampled_from(WEIGHTS),
    activation=st.sampled_from(ACTIVATIONS),
    expert_capacity=st.integers(0, 12),
)
def test_quantised_experts(
    strategy: str,
    shape: Shape,
    routing: str,
    fmt: QuantFormat,
    activation: QuantFormat | None,
    expert_capacity: int,
) -> None:
    torch.manual_seed(shape.seed)
    top_k = min(4, shape.num_experts)
    # Wide enough that one number rounded to the neighbouring code does not decide.
    sizes = (shape.hidden_size + 64, shape.width + 64, max(4, shape.num_experts))
    shape = replace(shape, num_experts=sizes[2], top_k=top_k)
    quantised = make_quantised(fmt, sum(shape.counts), torch.bfloat16, *sizes)
    fixture = quantised.floats
    _route(fixture, routing)
    if strategy == "ragged" and activation is not None:
        _drop_repeats(fixture)
    ep_config = EPConfig(experts=strategy, expert_capacity=expert_capacity)
    outputs = _run(
        shape,
        fixture,
        lambda local: experts_of(quantised, list(local.global_ids), activation),
        ep_config,
    )
    _check(shape, fixture, outputs, fixture.routed(cast=cast_of(activation)), fmt.output_limit)
