"""The collectives of one step, over two groups of ranks.

Tokens differ over the *token group* (data-parallel ranks) and are replicated over the *replica
group* (tensor-parallel ranks). Experts are split over all token_size * replica_size ranks, and
ep_rank = token_rank * replica_size + replica_rank.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vllm_moe_ep.device_groups import DeviceGroups
from vllm_moe_ep.rank_group import RankGroup


class Collectives(Protocol):
    """What the layer needs of a backend. Every rank must make the same calls in the same order,
    with the same shapes, also when it has no tokens.

    ``counts`` holds the number of collectives entered so far by name, in eager mode; an operation
    over a group of one rank is no collective.
    """

    token_size: int
    token_rank: int
    replica_size: int
    replica_rank: int
    counts: Counter[str]

    def all_gather(self, rows: Tensor) -> Tensor:
        """[rows, columns] of each token rank -> [token_size * rows, columns], in rank order."""
        ...

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """[token_size * rows, columns] -> the sum over the token group of this rank's rows."""
        ...

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the replica group, any shape; the argument may be overwritten."""
        ...

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Maximum over every EP rank, any shape; the argument may be overwritten."""
        ...


class SingleProcess:
    """One rank, no communication."""

    token_size = replica_size = 1
    token_rank = replica_rank = 0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        return rows

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        return values


class TorchDistributed:
    """Collectives over two torch.distributed process groups.

    Args:
        token_group: the data-parallel ranks that share this rank's replica_rank; None: one rank.
        replica_group: the tensor-parallel ranks of this rank's batch; None: one rank.
        use_reduce_scatter: False sums with an all-reduce and keeps this rank's rows. None picks
            that on gloo: older gloo has no reduce-scatter, and the one in torch 2.13 measured
            slower than its all-reduce at every size tried (2 and 4 ranks, 8 KiB to 16 MiB).
        device_groups: parts of the replica group, for an all-reduce in two steps; None: in one.
        replica_sum: an engine's own sum over the replica group, which may overwrite its argument,
            for the all-reduce in one step; None: torch.distributed's.
    """

    def __init__(
        self,
        token_group: dist.ProcessGroup | None,
        replica_group: dist.ProcessGroup | None,
        use_reduce_scatter: bool | None = None,
        device_groups: DeviceGroups | None = None,
        replica_sum: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._token = RankGroup(token_group, "token")
        self._replica = RankGroup(replica_group, "replica")
        self.token_size, self.token_rank = self._token.size, self._token.rank
        self.replica_size, self.replica_rank = self._replica.size, self._replica.rank
        self._token_rank = torch.tensor(self.token_rank)
        self._replica_sum = replica_sum
        self._within = self._across = None
        if device_groups is not None:
            self._within = RankGroup(device_groups.within, "within")
            self._across = RankGroup(device_groups.across, "across")
        if use_reduce_scatter is None:
            use_reduce_scatter = self.token_size > 1 and dist.get_backend(token_group) != "gloo"
        self.use_reduce_scatter = use_reduce_scatter
        self.counts: Counter[str] = Counter()

    def _count(self, name: str) -> None:
        # A counter changed inside a traced graph would force a recompile at each step.
        if not torch.compiler.is_compiling():
            self.counts[name] += 1

    def all_gather(self, rows: Tensor) -> Tensor:
        if self.token_size == 1:
            return rows
        self._count("all_gather")
        return self._token.all_gather(rows.contiguous())

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        if self.token_size == 1:
            return rows
        self._count("reduce_scatter")
        num_rows = rows.shape[0] // self.token_size
        if self.use_reduce_scatter:
            return self._token.reduce_scatter(rows.contiguous())
        summed = self._token.all_reduce(rows.contiguous(), "sum")
        if torch.compiler.is_compiling():
            # The rank as a tensor, so that all ranks trace one graph.
            own = torch.arange(num_rows, device=rows.device)
            return summed.index_select(0, own + self._token_rank.to(rows.device) * num_rows)
        return summed.narrow(0, self.token_rank * num_rows, num_rows)

    def all_reduce(self, values: Tensor) -> Tensor:
        if self.replica_size == 1:
            return values
        if self._within is not None and self._across is not None:
            self._count("all_reduce_within_devices")
            values = self._within.all_reduce(values.contiguous(), "sum")
            self._count("all_reduce_across_devices")
            return self._across.all_reduce(values, "sum")
        self._count("all_reduce")
        if self._replica_sum is not None:
            return self._replica_sum(values.contiguous())
        return self._replica.all_reduce(values.contiguous(), "sum")

    @property
    def summary(self) -> str:
        """The collectives of one step, in words."""
        steps = []
        if self.token_size > 1:
            combine = "reduce-scatter" if self.use_reduce_scatter else "all-reduce and narrow"
            steps.append(f"all-gather and {combine} over {self.token_size} data-parallel ranks")
        if self.replica_size > 1:
            how = "in one step"
            if self._within is not None and self._across is not None:
                how = f"in devices of {self._within.size}, then across {self._across.size} devices"
            steps.append(f"all-reduce over {self.replica_size} tensor-parallel ranks {how}")
        return "; ".join(steps) or "no collectives"

    def all_reduce_max(self, values: Tensor) -> Tensor:
        for ranks in (self._token, self._replica):
            if ranks.size > 1:
                self._count("all_reduce_max")
                values = ranks.all_reduce(values, "max")
        return values
