"""Each expert on a fixed number of rows: static shapes, for prompt chunks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.routing import normalise_topk_ids
from vllm_moe_ep.layers.row_parts import row_parts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens


def grouped_experts(tokens: RoutedTokens, shard: ExpertShard, expert_capacity: int) -> ExpertOutput:
    """Compute each expert on its first ``expert_capacity`` routed rows.

    Returns:
        The sum, and an overflow flag: 1 where some expert had more routed rows than that.
    """
    num_rows = tokens.hidden_states.shape[0]
    topk_ids = normalise_topk_ids(tokens.topk_ids, shard.num_experts)
    topk_weights = tokens.topk_weights.to(torch.float32)
    rows = shard.rows(tokens)
    # Row num_rows is the spare: unused table entries compute the last row and add to this one.
    total = rows.new_zeros((num_rows + 1, rows.shape[1]), dtype=torch.float32)
    overflow = torch.zeros(1, dtype=torch.int32, device=rows.device)
    # Without rows there is no last row, and nothing to compute.
    for slot in range(shard.linears.num_slots if num_rows else 0):
        routing = shard.routing(slot, topk_ids, topk_weights)
        table = _row_table(routing.routed, expert_capacity)
        row_weight = F.pad(routing.row_weight, (0, 1))
        for part in row_parts(expert_capacity, shard.max_rows):
            entries = table[part]
            inputs = rows.index_select(0, entries.clamp(max=num_rows - 1))
            values = shard.compute(slot, inputs, row_weight[entries])
            total.index_add_(0, entries, values.to(torch.float32))
        num_routed = routing.routed.sum(dtype=torch.int32)
        overflow = torch.maximum(overflow, (num_routed > expert_capacity).to(torch.int32))
    return ExpertOutput(total[:num_rows], overflow, with_spare_row=total)


def _row_table(routed: Tensor, expert_capacity: int) -> Tensor:
    """int64 [expert_capacity] row numbers of the first routed rows, then the spare row's."""
    num_rows = routed.shape[0]
    entry = torch.cumsum(routed, dim=0) - 1
    # Rows that are not routed, or come too late, go to one entry past the end, cut off below.
    entry = torch.where(routed & (entry < expert_capacity), entry, expert_capacity)
    table = torch.full((expert_capacity + 1,), num_rows, dtype=torch.int64, device=routed.device)
    row_numbers = torch.arange(num_rows, dtype=torch.int64, device=routed.device)
    return table.scatter(0, entry, row_numbers)[:expert_capacity]
