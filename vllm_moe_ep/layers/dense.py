"""Every local expert on all rows: static shapes, for few rows."""

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.routing import normalise_topk_ids
from vllm_moe_ep.layers.row_parts import row_parts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens


def dense_experts(tokens: RoutedTokens, shard: ExpertShard) -> ExpertOutput:
    """Compute all experts on all rows and select the routed ones."""
    return _all_slots(tokens, shard, gated=False, forced_gate=None)


def gated_experts(
    tokens: RoutedTokens, shard: ExpertShard, forced_gate: int | None
) -> ExpertOutput:
    """As ``dense_experts``, but an expert without a routed row is not read.

    Args:
        forced_gate: 0 or 1 replaces every gate (for timing; results are wrong with 0).
    """
    return _all_slots(tokens, shard, gated=True, forced_gate=forced_gate)


def _all_slots(
    tokens: RoutedTokens, shard: ExpertShard, gated: bool, forced_gate: int | None
) -> ExpertOutput:
    total = torch.zeros_like(tokens.hidden_states, dtype=torch.float32)
    for part in row_parts(tokens.hidden_states.shape[0], shard.max_rows):
        _add_slots(total[part], tokens.rows(part), shard, gated, forced_gate)
    return ExpertOutput(total)


def _add_slots(
    total: Tensor,
    tokens: RoutedTokens,
    shard: ExpertShard,
    gated: bool,
    forced_gate: int | None,
) -> None:
    rows = shard.rows(tokens)
    topk_ids = normalise_topk_ids(tokens.topk_ids, shard.num_experts)
    topk_weights = tokens.topk_weights.to(torch.float32)
    for slot in range(shard.linears.num_slots):
        routing = shard.routing(slot, topk_ids, topk_weights)
        flag = _gate(routing.routed, forced_gate) if gated else None
        values = shard.compute(slot, rows, routing.row_weight, flag)
        # A row that is not routed may hold NaN here, which a product with 0 would keep.
        total += torch.where(routing.routed[:, None], values, 0.0)


def _gate(routed: Tensor, forced_gate: int | None) -> Tensor:
    flag = routed.any().to(torch.int32).view(1, 1)
    return flag if forced_gate is None else torch.full_like(flag, forced_gate)
