"""A grouped kernel gets exactly the local (row, expert) pairs, whatever the routing holds."""

from typing import Any

import pytest
import torch
from layer_factory import config_of, layer_of, local_of
from oracle import Fixture, expert, make_fixture, rel_l2
from torch import Tensor

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.expert_weights import FloatExperts
from vllm_moe_ep.layers.fused_experts import MAX_PAIRS, alias_foreign
from vllm_moe_ep.layers.strategy_experts import strategy_layer

NUM_RANKS = 4


class StrictKernel(FloatExperts):
    """Computes pair by pair, and fails where a real kernel would read out of bounds."""

    def __init__(self, *weights: Any) -> None:
        super().__init__(*weights)
        self.pairs_of_calls: list[int] = []
        self.max_aliased_rows = 8

    def fused(self, rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        self.pairs_of_calls.append(slots.numel())
        assert slots.dtype == torch.int32 and weights.dtype == torch.float32
        assert slots.shape == weights.shape and len(slots) == len(rows) > 0
        assert ((slots >= 0) & (slots < self.num_slots)).all()
        output = torch.full_like(rows, float("nan"))
        for row, (own_slots, own_weights) in enumerate(zip(slots, weights, strict=True)):
            parts = [
                weight * expert(rows[row], self.w13_weight[slot], self.w2_weight[slot])
                for slot, weight in zip(own_slots.tolist(), own_weights.tolist(), strict=True)
            ]
            output[row] = torch.stack(parts).sum(0)
        return output


def rank_layer(fixture: Fixture, ep_size: int, ep_rank: int) -> EPLayer:
    local = local_of(fixture, ep_size, ep_rank)
    own = list(local.global_ids)
    config = config_of(fixture)
    kernel = StrictKernel(fixture.w13_weight[own], fixture.w2_weight[own], config)
    return strategy_layer(config, local, kernel, SingleProcess())


def ranks_sum(fixture: Fixture, ep_size: int) -> Tensor:
    capacity = len(fixture.hidden_states)
    arguments = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
    layers = [rank_layer(fixture, ep_size, rank) for rank in range(ep_size)]
    return sum(layer(*arguments, capacity=capacity) for layer in layers)


def small_fixture(num_tokens: int) -> Fixture:
    return make_fixture(num_tokens=num_tokens, hidden_size=16, moe_intermediate_size=8)


@pytest.mark.parametrize("ep_size", [1, NUM_RANKS, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 200])
def test_equals_the_oracle(num_tokens: int, ep_size: int) -> None:
    fixture = small_fixture(num_tokens)
    assert rel_l2(ranks_sum(fixture, ep_size), fixture.routed()) <= 1e-5


@pytest.mark.parametrize("ep_size", [1, NUM_RANKS])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_ids_without_an_expert_and_repeated_ids(num_tokens: int, ep_size: int) -> None:
    fixture = small_fixture(num_tokens)
    fixture.topk_ids[0] = torch.tensor([3, 3, -1, 16])
    fixture.topk_weights[0, 2:] = float("nan")
    assert rel_l2(ranks_sum(fixture, ep_size), fixture.routed()) <= 1e-5


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_no_pair_calls_no_kernel(num_tokens: int) -> None:
    fixture = small_fixture(num_tokens)
    fixture.topk_ids.fill_(-1)
    layer = rank_layer(fixture, 1, 0)
    values = layer(
        fixture.hidden_states, fixture.topk_ids, fixture.topk_weights, capacity=num_tokens
    )
    assert values.shape == fixture.hidden_states.shape
    assert torch.equal(values, torch.zeros_like(values))
    assert pairs_of_calls(layer) == []


@pytest.mark.parametrize("num_tokens", [16, 200, MAX_PAIRS])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_call_has_a_bounded_number_of_pairs(num_tokens: int, ep_size: int) -> None:
    """The kernel's memory grows with its pairs; one rank may get all pairs of all rows."""
    fixture = small_fixture(num_tokens)
    fixture.topk_ids[:] = torch.arange(4)
    layer = rank_layer(fixture, ep_size, 0)
    values = layer(
        fixture.hidden_states, fixture.topk_ids, fixture.topk_weights, capacity=num_tokens
    )
    assert rel_l2(values, fixture.routed()) <= 1e-5
    calls = pairs_of_calls(layer)
    assert sum(calls) == 4 * num_tokens
    assert len(calls) == -(-4 * num_tokens // MAX_PAIRS) and max(calls) <= MAX_PAIRS


def pairs_of_calls(layer: EPLayer) -> list[int]:
    kernel = layer.experts.shard.linears
    assert isinstance(kernel, StrictKernel)
    return kernel.pairs_of_calls


def test_other_strategies_do_without_it() -> None:
    fixture = small_fixture(5)
    assert layer_of(fixture).experts.shard.fused is None


def aliased(layer: EPLayer, fixture: Fixture) -> Tensor:
    """One rank's sum from the routing that names local experts only."""
    local = alias_foreign(fixture.topk_ids, fixture.topk_weights, layer.experts.shard)
    assert layer.experts.shard.fused is not None
    values = layer.experts.shard.fused.fused(fixture.hidden_states, local.slots, local.weights)
    return torch.where(local.has_local, values, 0.0)


@pytest.mark.parametrize("ep_size", [1, NUM_RANKS, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_foreign_ids_aliased_to_local_experts(num_tokens: int, ep_size: int) -> None:
    fixture = small_fixture(num_tokens)
    fixture.topk_ids[0] = torch.tensor([3, 3, -1, 16])
    fixture.topk_weights[0, 2:] = float("nan")
    values = sum(aliased(rank_layer(fixture, ep_size, r), fixture) for r in range(ep_size))
    assert rel_l2(values, fixture.routed()) <= 1e-5


def test_aliased_ids_let_no_nan_of_another_expert_through() -> None:
    fixture = small_fixture(64)
    # Slot 0 of the second rank is the alias of rows that have no expert there.
    fixture.topk_ids[fixture.topk_ids == 8] = 9
    fixture.topk_ids[:8] = torch.arange(4)
    clean = aliased(rank_layer(fixture, 2, 1), fixture)
    fixture.w13_weight[8] = float("nan")
    fixture.hidden_states[3] = float("inf")
    dirty = aliased(rank_layer(fixture, 2, 1), fixture)
    assert torch.equal(dirty, clean)
    assert torch.equal(dirty[:8], torch.zeros_like(dirty[:8]))


def test_aliasing_is_traced_without_a_break() -> None:
    fixture = small_fixture(5)
    shard = rank_layer(fixture, 2, 1).experts.shard
    routing = (fixture.topk_ids, fixture.topk_weights)
    traced = torch.compile(alias_foreign, backend="eager", fullgraph=True)(*routing, shard)
    plain = alias_foreign(*routing, shard)
    for name in ("slots", "weights", "has_local"):
        assert torch.equal(getattr(traced, name), getattr(plain, name))
