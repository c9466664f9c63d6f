import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_factory import shard_of, tokens_of
from oracle import assert_close, make_fixture

from vllm_moe_ep.layers.grouped import _row_table, grouped_experts


def _fixture_with_counts(most: int):  # type: ignore[no-untyped-def]
    """32 rows; expert 3 has ``most`` of them, the others fewer."""
    fixture = make_fixture(num_tokens=32, hidden_size=16, moe_intermediate_size=8, top_k=1)
    fixture.topk_ids[:] = (torch.arange(32).remainder(12) + 4)[:, None]
    fixture.topk_ids[torch.randperm(32)[:most]] = 3
    return fixture


@pytest.mark.parametrize(("most", "overflow"), [(4, 0), (5, 0), (6, 1), (32, 1)])
def test_overflow_flag(most: int, overflow: int) -> None:
    fixture = _fixture_with_counts(most)
    output = grouped_experts(tokens_of(fixture), shard_of(fixture), 5)
    assert output.overflow is not None
    assert output.overflow.dtype == torch.int32
    assert output.overflow.tolist() == [overflow]
    if not overflow:
        assert_close(output.values, fixture.routed(), torch.float32)


def test_rows_in_time_are_right_and_the_others_zero() -> None:
    fixture = _fixture_with_counts(9)
    output = grouped_experts(tokens_of(fixture), shard_of(fixture), 5)
    late = torch.nonzero(fixture.topk_ids[:, 0] == 3)[5:, 0]
    expected = fixture.routed()
    expected[late] = 0
    assert_close(output.values, expected, torch.float32)
    assert torch.equal(output.values[late], torch.zeros(4, 16))


@given(routed=st.lists(st.booleans(), max_size=40), expert_capacity=st.integers(1, 45))
def test_row_table(routed: list[bool], expert_capacity: int) -> None:
    """The first routed rows in order, then the spare row, whatever else was routed."""
    rows = [row for row, is_routed in enumerate(routed) if is_routed][:expert_capacity]
    expected = rows + [len(routed)] * (expert_capacity - len(rows))
    assert _row_table(torch.tensor(routed, dtype=torch.bool), expert_capacity).tolist() == expected


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_unused_table_entries_add_nothing(poison: float) -> None:
    """They compute zeros of the spare row, and rows that came too late stay out altogether."""
    fixture = _fixture_with_counts(9)
    late = torch.nonzero(fixture.topk_ids[:, 0] == 3)[5:, 0]
    expected = fixture.routed()
    fixture.hidden_states[late] = poison
    output = grouped_experts(tokens_of(fixture), shard_of(fixture), 5)
    expected[late] = 0
    assert_close(output.values, expected, torch.float32)
