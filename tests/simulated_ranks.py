"""Ranks as threads of one process: any number of them, quick to start, one collective at a time."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_TIMEOUT_SECONDS = 20


class _World:
    """What all ranks show each other in one collective."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=_TIMEOUT_SECONDS)
        self.shown: list[tuple[str, Tensor]] = [("", torch.empty(0))] * num_ranks

    def exchange(self, rank: int, name: str, values: Tensor) -> list[tuple[str, Tensor]]:
        """The collective and the values of every rank."""
        self.shown[rank] = (name, values.clone())
        self.barrier.wait()
        shown = list(self.shown)
        self.barrier.wait()
        return shown


class SimulatedRank:
    """The ``Collectives`` of one thread. A collective over one group is entered by all ranks."""

    def __init__(self, world: _World, rank: int, token_size: int, replica_size: int) -> None:
        self._world, self._rank = world, rank
        self.token_size, self.replica_size = token_size, replica_size
        self.token_rank, self.replica_rank = divmod(rank, replica_size)
        self.counts: Counter[str] = Counter()

    def _exchange(self, name: str, values: Tensor, members: list[int]) -> Tensor:
        """[members, ...]; fails where they are in different collectives, shapes or dtypes."""
        self.counts[name] += 1
        everyone = self._world.exchange(self._rank, name, values)
        shown = [everyone[member] for member in members]
        assert len({(called, each.shape, each.dtype) for called, each in shown}) == 1, shown
        return torch.stack([each for _, each in shown])

    @property
    def _token_group(self) -> list[int]:
        num_ranks = self.token_size * self.replica_size
        return list(range(self.replica_rank, num_ranks, self.replica_size))

    @property
    def _replica_group(self) -> list[int]:
        first = self.token_rank * self.replica_size
        return list(range(first, first + self.replica_size))

    def all_gather(self, rows: Tensor) -> Tensor:
        if self.token_size == 1:
            return rows
        return self._exchange("all_gather", rows, self._token_group).flatten(0, 1)

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        if self.token_size == 1:
            return rows
        summed = self._exchange("reduce_scatter", rows, self._token_group).sum(dim=0)
        num_rows = len(rows) // self.token_size
        return summed.narrow(0, self.token_rank * num_rows, num_rows)

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.replica_size == 1:
            return values
        return self._exchange("all_reduce", values, self._replica_group).sum(dim=0)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        everyone = list(range(self.token_size * self.replica_size))
        return self._exchange("all_reduce_max", values, everyone).amax(dim=0)


def run_ranks(
    token_size: int, replica_size: int, function: Callable[[SimulatedRank], Result]
) -> list[Result]:
    """``function`` on every rank at once; results by rank."""
    num_ranks = token_size * replica_size
    world = _World(num_ranks)
    ranks = [SimulatedRank(world, rank, token_size, replica_size) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(function, ranks))
