"""One group of ranks, with names for traced graphs that are equal on every rank.

torch numbers groups in the order of their creation, so that the groups of two ranks with the same
role have different names. A traced graph names the groups of its collectives: with torch's names
each rank would trace, and a backend would compile, a graph of its own.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _register_process_group

# Newer torch renames these two and warns about the old names; older torch has only the old.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional = torch.ops._c10d_functional

_groups_by_role: defaultdict[str, list[dist.ProcessGroup]] = defaultdict(list)


def common_name(group: dist.ProcessGroup, role: str) -> str:
    """A name by which torch finds ``group``: the same on all ranks that name their groups of one
    role in the same order.

    Args:
        group: this rank's group.
        role: what the group is for, such as "token".
    """
    known = _groups_by_role[role]
    for index, other in enumerate(known):
        if other is group:
            return _name(role, index)
    known.append(group)
    name = _name(role, len(known) - 1)
    _register_process_group(name, group)  # type: ignore[arg-type]
    return name


def _name(role: str, index: int) -> str:
    return f"vllm_moe_ep.{role}.{index}"


class RankGroup:
    """One group's collectives: in place in eager mode, functional ones in a traced graph.

    Args:
        group: the group; None: this rank alone, which enters no collective.
        role: what the group is for, such as "token"; see ``common_name``.
    """

    def __init__(self, group: dist.ProcessGroup | None, role: str) -> None:
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._group = group
        self._name = "" if group is None else common_name(group, role)

    def all_gather(self, rows: Tensor) -> Tensor:
        """Contiguous [rows, columns] -> [size * rows, columns]."""
        if torch.compiler.is_compiling():
            return _wait(_functional.all_gather_into_tensor(rows, self.size, self._name))
        gathered = rows.new_empty((self.size * rows.shape[0], rows.shape[1]))
        _all_gather(gathered, rows, group=self._group)
        return gathered

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Contiguous [size * rows, columns] -> this rank's sum [rows, columns]."""
        if torch.compiler.is_compiling():
            return _wait(_functional.reduce_scatter_tensor(rows, "sum", self.size, self._name))
        scattered = rows.new_empty((rows.shape[0] // self.size, rows.shape[1]))
        _reduce_scatter(scattered, rows, group=self._group)
        return scattered

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        """Contiguous values, reduced by "sum" or "max"; eager mode overwrites them."""
        if torch.compiler.is_compiling():
            return _wait(_functional.all_reduce(values, operation, self._name))
        op = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        dist.all_reduce(values, op=op, group=self._group)
        return values


def _wait(pending: Tensor) -> Tensor:
    return _functional.wait_tensor(pending)
