"""Rows per rank of a step: equal on every rank, few distinct values, never too few."""

from types import SimpleNamespace

import pytest
import torch

from vllm_moe_ep.adapters.vllm.capacity import largest_capacity, step_capacity


def metadata(*num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(num_tokens))


def test_own_rows_suffice_without_data_parallelism() -> None:
    assert step_capacity(7, None, 16) == 7


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [((1, 1), 16), ((0, 16), 16), ((17, 3), 32), ((512, 1, 1), 512), ((513, 1), 1024)],
)
def test_every_rank_takes_the_same_power_of_two(num_tokens: tuple[int, ...], expected: int) -> None:
    capacities = {step_capacity(own, metadata(*num_tokens), 16) for own in num_tokens}
    assert capacities == {expected}


@pytest.mark.parametrize("max_num_tokens", [1, 16, 64, 100, 4096])
def test_largest_capacity_bounds_every_step(max_num_tokens: int) -> None:
    bound = largest_capacity(max_num_tokens, 16)
    for num_tokens in range(max_num_tokens + 1):
        assert num_tokens <= step_capacity(num_tokens, metadata(num_tokens, 0), 16) <= bound
