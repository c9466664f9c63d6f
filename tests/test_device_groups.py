"""The all-reduce in two steps: when, over which ranks, and with what sums."""

from functools import cache

import pytest
import torch
from process_pool import ProcessPool, Worker
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.device_groups import (
    device_members,
    device_size_of,
    make_device_groups,
    why_flat,
)


@pytest.mark.parametrize(
    ("sizes", "is_enabled", "reason"),
    [
        ((64, 64, 4), True, None),
        ((4, 4, 2), True, None),
        ((8, 8, 4), False, "switched off"),
        ((8, 8, 1), True, "a device of its own"),
        ((8, 16, 4), True, "over 8 of 16 ranks"),
        ((4, 4, 4), True, "4 ranks share one device of 4"),
        ((2, 2, 4), True, "2 ranks share one device of 4"),
        ((6, 6, 4), True, "6 ranks are not a multiple of the device size 4"),
    ],
)
def test_where_it_applies(
    sizes: tuple[int, int, int], is_enabled: bool, reason: str | None
) -> None:
    actual = why_flat(*sizes, is_enabled)
    assert actual is None if reason is None else reason in str(actual)


def test_device_size_follows_the_platform_unless_set() -> None:
    assert (device_size_of("neuron", 0), device_size_of("cpu", 0)) == (4, 1)
    assert (device_size_of("neuron", 2), device_size_of("cpu", 8)) == (2, 8)


@pytest.mark.parametrize(("num_ranks", "device_size"), [(64, 4), (8, 2), (9, 3)])
def test_members(num_ranks: int, device_size: int) -> None:
    """Each rank is in one group of either step, with its device or with its core index."""
    groups = device_members(num_ranks, device_size)
    num_devices = num_ranks // device_size
    assert [len(group) for group in groups] == (
        [device_size] * num_devices + [num_devices] * device_size
    )
    for group in groups[:num_devices]:
        assert len({rank // device_size for rank in group}) == 1
    for group in groups[num_devices:]:
        assert len({rank % device_size for rank in group}) == 1
    assert sorted(sum(groups, [])) == sorted(2 * list(range(num_ranks)))


@cache
def _hierarchical() -> TorchDistributed:
    """Made once per process, by all four in the same order."""
    world = torch.distributed.group.WORLD
    assert world is not None
    return TorchDistributed(None, world, device_groups=make_device_groups(world, 2))


def sums(worker: Worker, parts: list[Tensor]) -> tuple[Tensor, Tensor, dict[str, int]]:
    ours = _hierarchical()
    before = ours.counts.copy()
    hierarchical = ours.all_reduce(parts[worker.rank].clone())
    flat = TorchDistributed(None, worker.layouts[1, 4].replica_group)
    counts = dict(ours.counts - before)
    return hierarchical, flat.all_reduce(parts[worker.rank].clone()), counts


@pytest.mark.parametrize("shape", [(1, 5120), (7, 33), (0, 8)])
def test_equals_the_flat_sum(processes: ProcessPool, shape: tuple[int, int]) -> None:
    """Within fp32 rounding; and bit for bit the same on all ranks, whose tokens are replicas."""
    parts = [torch.randn(shape) for _ in range(4)]
    exact = torch.stack(parts).double().sum(dim=0)
    bound = 3 * torch.finfo(torch.float32).eps * torch.stack(parts).double().abs().sum(dim=0)
    results = processes.run(sums, 4, parts)
    for hierarchical, flat, counts in results:
        assert ((hierarchical.double() - exact).abs() <= bound).all()
        assert ((hierarchical.double() - flat.double()).abs() <= bound).all()
        assert torch.equal(hierarchical, results[0][0])
        assert counts == {"all_reduce_within_devices": 1, "all_reduce_across_devices": 1}


def maximum(worker: Worker) -> list[int]:
    return _hierarchical().all_reduce_max(torch.tensor([worker.rank], dtype=torch.int32)).tolist()


def test_the_maximum_is_over_all_ranks(processes: ProcessPool) -> None:
    assert processes.run(maximum, 4) == [[3]] * 4


def traced(worker: Worker, parts: list[Tensor]) -> tuple[Tensor, str]:
    ours = _hierarchical()

    class Sum(torch.nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return ours.all_reduce(values)

    program = torch.export.export(Sum(), (parts[worker.rank],))
    return program.module()(parts[worker.rank]), program.graph_module.code


def test_traces_to_one_graph_on_all_ranks(processes: ProcessPool) -> None:
    """Ranks are in different groups, which the graph calls by the same name."""
    parts = [torch.randn(3, 8) for _ in range(4)]
    results = processes.run(traced, 4, parts)
    for summed, _ in results:
        torch.testing.assert_close(summed, torch.stack(parts).sum(dim=0))
    (code,) = {code for _, code in results}
    assert code.count("all_reduce.default(") == 2
