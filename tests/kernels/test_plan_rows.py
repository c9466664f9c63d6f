"""Rows of pairs: against plain loops, for each implementation."""

import pytest
import torch
from torch import Tensor

from tests.kernels.row_kernels import implementations, row_kernels


def expected(
    ids: Tensor, expert_map: list[int] | None, num_experts: int, alignment: int
) -> tuple[list[int], list[int]]:
    """By Python's integers, expert by expert."""
    flat = ids.flatten().tolist()
    known = range(num_experts if expert_map is None else len(expert_map))
    local = [-1 if i not in known else (i if expert_map is None else expert_map[i]) for i in flat]
    rows, ends, start = [-1] * len(flat), [], 0
    for expert in range(num_experts):
        row = start
        for pair, found in enumerate(local):
            if found == expert:
                rows[pair] = row
                row += 1
        ends.append(row)
        start = (row + alignment - 1) // alignment * alignment
    return rows, ends


@implementations
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "alignment"),
    [(1, 1, 1, 8), (1, 8, 32, 128), (7, 3, 5, 64), (64, 8, 40, 16), (171, 6, 33, 128)],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_map", [False, True])
def test_equals_plain_loops(
    implementation: str,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    alignment: int,
    dtype: torch.dtype,
    has_map: bool,
) -> None:
    kernels = row_kernels(implementation)
    num_ids = 2 * num_experts if has_map else num_experts
    ids = torch.randint(-2, num_ids + 2, (num_tokens, top_k), dtype=dtype)
    if dtype is torch.int64:
        ids[0, 0] = 2**32
    expert_map = None
    if has_map:
        local = torch.randperm(num_ids)
        expert_map = torch.where(local < num_experts, local, -1).to(torch.int32)
    rows, ends = kernels.get("plan_rows")(
        ids.to(kernels.device),
        None if expert_map is None else expert_map.to(kernels.device),
        num_experts,
        alignment,
    )
    assert rows.dtype == ends.dtype == torch.int32 and rows.shape == ids.shape
    map_list = None if expert_map is None else expert_map.tolist()
    assert (rows.flatten().tolist(), ends.tolist()) == expected(
        ids, map_list, num_experts, alignment
    )


@implementations
def test_one_expert_takes_every_pair(implementation: str) -> None:
    kernels = row_kernels(implementation)
    ids = torch.full((300, 4), 2, dtype=torch.int32, device=kernels.device)
    rows, ends = kernels.get("plan_rows")(ids, None, 4, 128)
    assert rows.flatten().tolist() == list(range(1200))
    assert ends.tolist() == [0, 0, 1200, 1280]
