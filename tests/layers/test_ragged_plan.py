import pytest
import torch
from layer_factory import shard_of, tokens_of
from oracle import Fixture, make_fixture

from vllm_moe_ep.layers.ragged_plan import MAX_LISTED_IDS, RaggedPlan, plan_pairs, rounded_row_count

Pair = tuple[int, int, float]


def _fixture(num_tokens: int) -> Fixture:
    fixture = make_fixture(num_tokens=num_tokens, hidden_size=4, moe_intermediate_size=2)
    fixture.topk_ids[fixture.topk_ids == 6] = -1
    fixture.topk_ids[fixture.topk_ids == 7] = 16
    return fixture


def _pairs(plan: RaggedPlan) -> list[Pair]:
    slots = [slot for slot, n in zip(plan.slots, plan.counts, strict=True) for _ in range(n)]
    return list(zip(slots, plan.rows.tolist(), plan.weights.tolist(), strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_LISTED_IDS // 4, MAX_LISTED_IDS // 4 + 1, 300])
def test_pairs_of_one_rank(num_tokens: int) -> None:
    """Rank 1 of 4 owns the experts 4 to 7."""
    fixture = _fixture(num_tokens)
    plan = plan_pairs(tokens_of(fixture), shard_of(fixture, 4, 1))
    expected = [
        (expert - 4, row, weight)
        for row, ids in enumerate(fixture.topk_ids.tolist())
        for expert, weight in zip(ids, fixture.topk_weights[row].tolist(), strict=True)
        if 4 <= expert < 8
    ]
    assert _pairs(plan) == sorted(expected, key=lambda pair: pair[:2])
    assert plan.slots == sorted(set(plan.slots))
    assert all(count > 0 for count in plan.counts)
    assert (plan.rows.dtype, plan.weights.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("max_pairs", [1, 7, 40, 10_000])
def test_batches_are_whole_experts_in_order(max_pairs: int) -> None:
    fixture = _fixture(100)
    plan = plan_pairs(tokens_of(fixture), shard_of(fixture))
    batches = list(plan.batches(max_pairs))
    assert [pair for batch in batches for pair in _pairs(batch)] == _pairs(plan)
    for batch in batches:
        assert len(batch.slots) == 1 or sum(batch.counts) <= max_pairs
    for batch, following in zip(batches, batches[1:], strict=False):
        assert sum(batch.counts) + following.counts[0] > max_pairs


@pytest.mark.parametrize("max_pairs", [1, 7, 10_000])
def test_splitting_keeps_every_pair_in_its_place(max_pairs: int) -> None:
    fixture = _fixture(100)
    plan = plan_pairs(tokens_of(fixture), shard_of(fixture))
    split = plan.split(max_pairs)
    assert _pairs(split) == _pairs(plan)
    assert max(split.counts) == min(max_pairs, max(plan.counts)) and min(split.counts) > 0


def test_no_pairs_no_batches() -> None:
    fixture = _fixture(0)
    assert not list(plan_pairs(tokens_of(fixture), shard_of(fixture)).batches(8))


def test_row_counts_are_rounded_to_few_values() -> None:
    counts = range(1, 513)
    assert all(count <= rounded_row_count(count) <= max(2 * count, count + 31) for count in counts)
    assert len({rounded_row_count(count) for count in counts}) == 6 + 15


@pytest.mark.parametrize("num_tokens", [0, 3, 100])
def test_rounding_adds_only_weightless_pairs_of_the_spare_row(num_tokens: int) -> None:
    fixture = _fixture(num_tokens)
    plan = plan_pairs(tokens_of(fixture), shard_of(fixture))
    rounded = plan.rounded(spare_row=num_tokens)
    assert rounded.counts == [rounded_row_count(count) for count in plan.counts]
    pairs = _pairs(rounded)
    assert [pair for pair in pairs if pair[1] != num_tokens] == _pairs(plan)
    assert all(pair[2] == 0.0 for pair in pairs if pair[1] == num_tokens)
