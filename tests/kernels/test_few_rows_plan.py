"""Tiles of pairs: against plain loops, for each implementation."""

import pytest
import torch

from tests.kernels.few_rows import Case, few_row_kernels, random_routing
from tests.kernels.row_kernels import implementations
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting, RowTiles, max_row_tiles


def tiles_by_loops(routing: PairRouting, block_rows: int) -> list[tuple[int, list[int]]]:
    empty = torch.empty(0)
    local = Case(empty, empty, None, empty, routing).local()
    tiles = []
    for expert in range(routing.num_local_experts):
        pairs = [pair for pair, found in enumerate(local) if found == expert]
        for start in range(0, len(pairs), block_rows):
            part = pairs[start : start + block_rows]
            tiles.append((expert, part + [-1] * (block_rows - len(part))))
    return tiles


def check(tiles: RowTiles, routing: PairRouting, block_rows: int) -> None:
    expected = tiles_by_loops(routing, block_rows)
    experts = tiles.expert.tolist()
    assert experts[: len(expected)] == [expert for expert, _ in expected]
    assert set(experts[len(expected) :]) <= {-1}
    assert tiles.pairs[: len(expected)].tolist() == [pairs for _, pairs in expected]


@implementations
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_rows"),
    [(1, 1, 1, 8), (1, 8, 32, 16), (7, 3, 5, 8), (64, 8, 40, 16), (171, 6, 33, 64)],
)
@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_plain_loops(
    implementation: str,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    block_rows: int,
    has_map: bool,
    dtype: torch.dtype,
) -> None:
    kernels = few_row_kernels(implementation)
    routing = random_routing(num_tokens, top_k, num_experts, has_map)
    ids = routing.topk_ids.to(dtype)
    if dtype is torch.int64:
        ids[0, 0] = 2**32
    expert_map = routing.expert_map
    moved = PairRouting(
        ids.to(kernels.device),
        None if expert_map is None else expert_map.to(kernels.device),
        num_experts,
    )
    tiles, cast = kernels.get("few_rows_plan")(moved, block_rows, None)
    assert cast is None
    check(tiles, PairRouting(ids, expert_map, num_experts), block_rows)


@implementations
@pytest.mark.parametrize("expert", [2, -1])
def test_one_expert_takes_every_pair_or_none_does(implementation: str, expert: int) -> None:
    kernels = few_row_kernels(implementation)
    # More pairs than one pass of the kernel takes.
    ids = torch.full((1100, 4), expert, dtype=torch.int32)
    routing = PairRouting(ids.to(kernels.device), None, 4)
    check(kernels.get("few_rows_plan")(routing, 16, None)[0], routing, 16)


@implementations
def test_casts_rows(implementation: str) -> None:
    kernels = few_row_kernels(implementation)
    hidden = (torch.randn(5, 1280) * 10.0 ** torch.randn(5, 1)).bfloat16()
    hidden[0, 3], hidden[4, 100] = 1e30, torch.nan
    # Rows of a wider tensor.
    strided = torch.cat([hidden, hidden.neg()], dim=1).to(kernels.device)[:, :1280]
    routing = PairRouting(torch.zeros(5, 2, dtype=torch.int32, device=kernels.device), None, 3)
    tiles, cast = kernels.get("few_rows_plan")(routing, 8, strided)
    check(tiles, routing, 8)
    groups = hidden.double().view(5, 10, 128)
    wanted_scale = (groups.abs().amax(2) / 448).float()
    torch.testing.assert_close(cast[1].cpu(), wanted_scale, rtol=1e-6, atol=0, equal_nan=True)
    kernels.check_fp8(cast[0].cpu(), (groups / wanted_scale.double()[..., None]).float().flatten(1))


@pytest.mark.parametrize(("num_pairs", "num_experts", "block_rows"), [(7, 3, 4), (5, 8, 4)])
def test_most_tiles_by_trying_all_splits(num_pairs: int, num_experts: int, block_rows: int) -> None:
    most = 0
    splits = [[]] if num_experts else []
    for _ in range(num_experts):
        splits = [[*split, c] for split in splits for c in range(num_pairs - sum(split) + 1)]
    for split in splits:
        most = max(most, sum(-(-count // block_rows) for count in split))
    assert max_row_tiles(num_pairs, num_experts, block_rows) == most


def test_no_pairs_need_no_tiles() -> None:
    assert max_row_tiles(0, 5, 16) == 0
