"""Give each (token, slot) pair its row in one buffer of all experts' rows."""

import torch
from torch import Tensor


def plan_rows(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int, alignment: int
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert and then by pair, each expert's first one on the alignment.

    Args:
        topk_ids: [num_tokens, top_k], any signed integer dtype.
        expert_map: int32 [num_experts], the local id of each global one or -1. None: ids are
            local. An id outside the map, or without it outside [0, num_local_experts), selects
            no local expert.
        num_local_experts: experts held.
        alignment: rows.

    Returns:
        row_of_pair: int32 [num_tokens, top_k], -1 where no local expert is selected.
        expert_ends: int32 [num_local_experts], the row after each expert's last one. Expert e
            starts at expert_ends[e - 1] rounded up to the alignment.
    """
    num_ids = num_local_experts if expert_map is None else expert_map.shape[0]
    ids = topk_ids.to(torch.int64)
    is_known = (ids >= 0) & (ids < num_ids)
    local = torch.where(is_known, ids, 0)
    if expert_map is not None:
        local = expert_map.to(torch.int64)[local]
    local = torch.where(is_known, local, -1)
    row_of_pair = torch.full(topk_ids.shape, -1, dtype=torch.int32, device=topk_ids.device)
    ends = []
    start = 0
    for expert in range(num_local_experts):
        hits = local == expert
        count = int(hits.sum())
        rows = torch.arange(start, start + count, dtype=torch.int32, device=topk_ids.device)
        row_of_pair[hits] = rows
        ends.append(start + count)
        start = -(-(start + count) // alignment) * alignment
    return row_of_pair, torch.tensor(ends, dtype=torch.int32, device=topk_ids.device)
