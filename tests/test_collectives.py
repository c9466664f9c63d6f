"""Each collective against arithmetic on whole numbers, in real gloo processes."""

from typing import Any

import pytest
import torch
from process_pool import ProcessPool, Worker
from torch import Tensor

from vllm_moe_ep.collectives import Collectives, SingleProcess, TorchDistributed

LAYOUTS = [(1, 1), (1, 2), (2, 1), (3, 1), (1, 4), (2, 2), (4, 1)]


def _rows(rank: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(num_rows * 3).view(num_rows, 3).add(100 * rank).remainder(250).to(dtype)


def _sum_of_rows(ranks: list[int], num_rows: int) -> Tensor:
    return torch.stack([_rows(rank, num_rows, torch.float32) for rank in ranks]).sum(dim=0)


def run_all(
    worker: Worker, layout: tuple[int, int], use_reduce_scatter: bool | None, num_rows: int
) -> dict[str, Any]:
    groups = worker.layouts[layout]
    ours = TorchDistributed(groups.token_group, groups.replica_group, use_reduce_scatter)
    wide = _rows(worker.rank, num_rows * layout[0], torch.float32)
    return {
        "ranks": (ours.token_size, ours.token_rank, ours.replica_size, ours.replica_rank),
        "bytes": ours.all_gather(_rows(worker.rank, num_rows, torch.uint8)),
        "strided": ours.all_gather(_rows(worker.rank, 2 * num_rows, torch.float32)[::2]),
        "reduce_scatter": ours.reduce_scatter(wide),
        "all_reduce": ours.all_reduce(_rows(worker.rank, num_rows, torch.float32)),
        "max": ours.all_reduce_max(torch.tensor([worker.rank], dtype=torch.int32)),
        "counts": dict(ours.counts),
    }


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("use_reduce_scatter", [None, True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_counts(
    processes: ProcessPool,
    layout: tuple[int, int],
    use_reduce_scatter: bool | None,
    num_rows: int,
) -> None:
    token_size, replica_size = layout
    num_ranks = token_size * replica_size
    results = processes.run(run_all, num_ranks, layout, use_reduce_scatter, num_rows)
    for rank, result in enumerate(results):
        token_rank, replica_rank = divmod(rank, replica_size)
        assert result["ranks"] == (token_size, token_rank, replica_size, replica_rank)
        token_peers = [t * replica_size + replica_rank for t in range(token_size)]
        replica_peers = [token_rank * replica_size + r for r in range(replica_size)]
        gathered = torch.cat([_rows(peer, num_rows, torch.uint8) for peer in token_peers])
        assert torch.equal(result["bytes"], gathered)
        halves = [_rows(peer, 2 * num_rows, torch.float32)[::2] for peer in token_peers]
        assert torch.equal(result["strided"], torch.cat(halves))
        wide = _sum_of_rows(token_peers, num_rows * token_size)
        own = slice(token_rank * num_rows, (token_rank + 1) * num_rows)
        assert torch.equal(result["reduce_scatter"], wide[own])
        assert torch.equal(result["all_reduce"], _sum_of_rows(replica_peers, num_rows))
        assert result["max"].tolist() == [num_ranks - 1]
        expected_counts: dict[str, int] = {}
        if token_size > 1:
            expected_counts |= {"all_gather": 2, "reduce_scatter": 1}
        if replica_size > 1:
            expected_counts |= {"all_reduce": 1}
        if num_ranks > 1:
            expected_counts |= {"all_reduce_max": (token_size > 1) + (replica_size > 1)}
        assert result["counts"] == expected_counts


def choice(worker: Worker) -> bool:
    return TorchDistributed(worker.layouts[2, 1].token_group, None).use_reduce_scatter


def test_gloo_sums_with_an_all_reduce(processes: ProcessPool) -> None:
    assert processes.run(choice, 2) == [False, False]


def test_single_process_changes_nothing() -> None:
    ours: Collectives = SingleProcess()
    values = torch.randn(4, 3)
    expected = values.clone()
    for operation in (ours.all_gather, ours.reduce_scatter, ours.all_reduce, ours.all_reduce_max):
        assert torch.equal(operation(values), expected)
    assert (ours.token_size, ours.token_rank, ours.replica_size, ours.replica_rank) == (1, 0, 1, 0)
    assert not ours.counts
