"""Rows of all local experts in one buffer, each expert's share on an aligned start.

Every shape follows from the number of tokens alone: no count travels to the host, so a step can
be captured in a CUDA graph and replayed with other routing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class ContiguousLayout:
    """Where each (token, slot) pair's row is.

    Pairs are sorted by expert, in token order within one. Pairs that select no local expert
    follow the last expert; the kernel skips their rows, whose output is unspecified.

    Attributes:
        row_of_pair: int64 [num_tokens * top_k], row of each pair.
        token_of_row: int64 [max_rows], -1 in padding rows.
        expert_of_row: int32 [max_rows], -1 in rows without an expert.
        is_routed: bool [num_tokens, top_k], False where no local expert is selected.
        grouped_layout: int32, what the kernel reads. SM90: `expert_of_row`. SM100:
            [num_local_experts], the running sum of the aligned counts.
    """

    row_of_pair: Tensor
    token_of_row: Tensor
    expert_of_row: Tensor
    is_routed: Tensor
    grouped_layout: Tensor

    def gather(self, hidden_states: Tensor) -> Tensor:
        """[num_tokens, width] -> [max_rows, width]; padding rows repeat token 0."""
        return hidden_states[self.token_of_row.clamp(min=0)]


def max_layout_rows(num_pairs: int, num_local_experts: int, alignment: int) -> int:
    """Upper bound of the rows, whatever the routing: each expert hit may waste alignment - 1."""
    return num_pairs + min(num_pairs, num_local_experts) * (alignment - 1)


def plan_contiguous(
    topk_ids: Tensor, num_local_experts: int, alignment: int, major: int
) -> ContiguousLayout:
    """Lay out the pairs of one step.

    Args:
        topk_ids: [num_tokens, top_k] local expert ids of any signed integer dtype; an id outside
            [0, num_local_experts) selects no local expert.
        alignment: rows, the library's own value.
        major: 9 or 10, the compute capability whose form of grouped_layout is wanted.
    """
    num_pairs = topk_ids.numel()
    max_rows = max_layout_rows(num_pairs, num_local_experts, alignment)
    ids = topk_ids.reshape(-1).to(torch.int64)
    is_routed = (ids >= 0) & (ids < num_local_experts)
    # Pairs without an expert form one more group, after the last expert.
    ids = torch.where(is_routed, ids, num_local_experts)
    counts = ids.new_zeros(num_local_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    aligned_ends = _aligned(counts, alignment).cumsum(0)
    starts = counts.cumsum(0) - counts
    aligned_starts = aligned_ends - _aligned(counts, alignment)

    sorted_ids, order = ids.sort(stable=True)
    rank = torch.arange(num_pairs, device=ids.device) - starts[sorted_ids]
    rows = aligned_starts[sorted_ids] + rank
    token_of_row = ids.new_full((max_rows,), -1).scatter_(0, rows, order // topk_ids.shape[1])
    experts = torch.where(sorted_ids < num_local_experts, sorted_ids, _NO_EXPERT)
    expert_of_row = ids.new_full((max_rows,), _NO_EXPERT).scatter_(0, rows, experts)
    expert_of_row = expert_of_row.to(torch.int32)
    running_sums = aligned_ends[:num_local_experts].to(torch.int32)
    return ContiguousLayout(
        row_of_pair=torch.empty_like(ids).scatter_(0, order, rows),
        token_of_row=token_of_row,
        expert_of_row=expert_of_row,
        is_routed=is_routed.view(topk_ids.shape),
        grouped_layout=expert_of_row if major == 9 else running_sums,
    )


def _aligned(counts: Tensor, alignment: int) -> Tensor:
    return (counts + alignment - 1) // alignment * alignment
