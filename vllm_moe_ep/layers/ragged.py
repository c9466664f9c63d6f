"""Each expert on its routed rows alone: shapes depend on data, for the host."""

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.fused_experts import fused_rows
from vllm_moe_ep.layers.ragged_plan import RaggedPlan, one_row_weights, plan_pairs
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens

# Elementwise work is shared by experts with few rows, and done on many rows expert by expert,
# while they are still in cache.
MAX_BATCHED_PAIRS = 96


def ragged_experts(tokens: RoutedTokens, shard: ExpertShard) -> ExpertOutput:
    """Compute each hit expert on its rows; no row meets an expert it is not routed to."""
    if shard.fused is not None:
        return ExpertOutput(fused_rows(tokens, shard, shard.fused))
    rows = shard.rows(tokens)
    if rows.shape[0] == 1:
        return ExpertOutput(_one_row(rows, tokens, shard))
    num_rows = rows.shape[0]
    # Row num_rows is the spare that fills up an expert's rows: it computes the last row, and nobody
    # reads what is added to it.
    total = rows.new_zeros((num_rows + 1, rows.shape[1]), dtype=torch.float32)
    plan = plan_pairs(tokens, shard).rounded(num_rows).split(shard.max_rows)
    for batch in plan.batches(MAX_BATCHED_PAIRS):
        inputs = rows.index_select(0, batch.rows.clamp(max=num_rows - 1))
        total.index_add_(0, batch.rows, _compute(inputs, batch, shard))
    return ExpertOutput(total[:num_rows])


def _compute(inputs: Tensor, batch: RaggedPlan, shard: ExpertShard) -> Tensor:
    """fp32 [pairs, hidden_size], weighted, from one input row per pair."""
    inputs_of = zip(batch.slots, inputs.split(batch.counts), strict=True)
    products = [shard.linears.gate_up(slot, part) for slot, part in inputs_of]
    activated = shard.activate(_join(products), batch.weights)
    del products
    activated_of = zip(batch.slots, activated.split(batch.counts), strict=True)
    return _join([shard.linears.down(slot, part) for slot, part in activated_of]).float()


def _one_row(row: Tensor, tokens: RoutedTokens, shard: ExpertShard) -> Tensor:
    """fp32 [1, hidden_size]. The commonest decode step: no gather, no scatter, fewer ops."""
    weight_of = one_row_weights(tokens, shard)
    if not weight_of:
        return torch.zeros(row.shape, dtype=torch.float32, device=row.device)
    row_weight = torch.tensor(list(weight_of.values()), dtype=torch.float32, device=row.device)
    gate_up = _join([shard.linears.gate_up(slot, row) for slot in weight_of])
    parts = zip(weight_of, shard.activate(gate_up, row_weight).split(1), strict=True)
    values = _join([shard.linears.down(slot, part) for slot, part in parts])
    return values.sum(dim=0, keepdim=True, dtype=torch.float32)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
