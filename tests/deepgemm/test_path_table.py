"""The choice of a way per size."""

import pytest

from vllm_moe_ep.deepgemm.path_table import TABLE, Entry, choose, first_tokens, only, with_few_rows

ENTRIES = (Entry(0.0, "engine"), Entry(24.0, "deepgemm", 64), Entry(192.0, "deepgemm", 128))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (95, 0), (96, 1), (767, 1), (768, 2), (100000, 2)]
)
def test_boundaries(num_tokens: int, expected: int) -> None:
    assert choose(ENTRIES, num_tokens, 8, 32) is ENTRIES[expected]


@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 32), (8, 256), (6, 384), (7, 33)])
def test_first_tokens_is_the_smallest_that_reaches_an_entry(top_k: int, num_experts: int) -> None:
    for entry in ENTRIES[1:]:
        tokens = first_tokens(entry, top_k, num_experts)
        assert choose(ENTRIES, tokens, top_k, num_experts) is entry
        assert choose(ENTRIES, tokens - 1, top_k, num_experts) is not entry


def test_one_way_only() -> None:
    assert only("deepgemm", ENTRIES) == (Entry(0.0, "deepgemm", 64), ENTRIES[2])
    assert only("engine", ENTRIES) == (ENTRIES[0],)


def test_the_tables_are_sorted_and_start_at_zero() -> None:
    for entries in TABLE.values():
        thresholds = [entry.min_rows_per_expert for entry in entries]
        assert thresholds[0] == 0 and thresholds == sorted(set(thresholds))
        assert all((entry.alignment is None) == (entry.path == "engine") for entry in entries)


def test_few_rows_below_a_limit_and_deepgemm_above() -> None:
    assert with_few_rows(48.0, ENTRIES) == (
        Entry(0.0, "few_rows"),
        Entry(48.0, "deepgemm", 64),
        ENTRIES[2],
    )
    assert with_few_rows(500.0, ENTRIES)[1:] == (Entry(500.0, "deepgemm", 128),)
