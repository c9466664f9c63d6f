"""Which (token, slot) pairs meet which local expert, as the few-row kernels are told.

A pair's number is token * top_k + slot, and its row in every buffer of pairs has that number:
nothing is permuted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Pairs sorted by expert, in tiles of one expert each.

    Attributes:
        expert: int32 [num_tiles], local id, -1 where the tile is empty.
        pairs: int32 [num_tiles, block_rows], ascending within an expert, -1 behind its last one.
            What an empty tile holds is not specified.
    """

    expert: Tensor
    pairs: Tensor


@dataclass(frozen=True, slots=True)
class PairRouting:
    """The routing of one step.

    Attributes:
        topk_ids: [num_tokens, top_k], any signed integer dtype.
        expert_map: int32 [num_experts], the local id of each global one or -1. None: ids are
            local. An id outside the map, or without it outside [0, num_local_experts), selects
            no local expert.
        num_local_experts: experts held.
        tiles: the same pairs in tiles; None: each program looks its pairs up by itself.
    """

    topk_ids: Tensor
    expert_map: Tensor | None
    num_local_experts: int
    tiles: RowTiles | None = None

    @property
    def num_pairs(self) -> int:
        return self.topk_ids.numel()

    @property
    def num_ids(self) -> int:
        """Ids from 0 up to here are known."""
        return self.num_local_experts if self.expert_map is None else self.expert_map.shape[0]


def local_ids(routing: PairRouting) -> Tensor:
    """int64 [num_pairs]: each pair's local expert, -1 for none."""
    ids = routing.topk_ids.flatten().to(torch.int64)
    is_known = (ids >= 0) & (ids < routing.num_ids)
    local = torch.where(is_known, ids, 0)
    if routing.expert_map is not None:
        local = routing.expert_map.to(torch.int64)[local]
    return torch.where(is_known, local, -1)


def max_row_tiles(num_pairs: int, num_local_experts: int, block_rows: int) -> int:
    """The most tiles that pairs can need, however they are routed."""
    if num_pairs == 0:
        return 0
    num_groups = min(num_pairs, num_local_experts)
    return (num_pairs + num_groups * (block_rows - 1)) // block_rows
