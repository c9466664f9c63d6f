"""Routed rows through a grouped kernel that takes only experts of this rank."""

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import FusedExperts
from vllm_moe_ep.layers.ragged_plan import one_row_weights
from vllm_moe_ep.stages import LocalRouting, RoutedTokens

MAX_PAIRS = 512
"""Of one call of the kernel, whose memory grows with them. Measured at 64 experts of 1024 x 512:
calls of fewer pairs cost up to 15 % more time, one call of 8192 pairs 10 % more."""


def alias_foreign(topk_ids: Tensor, topk_weights: Tensor, shard: ExpertShard) -> LocalRouting:
    """Let each foreign id point at a local expert of the same row, with weight 0.

    Only an expert that the row has anyway can add nothing for sure: 0 times its NaN is a NaN
    that the row gets in any case. No shape depends on data, so this can be traced; the price is
    as many pairs as there are ids, which pays for few rows only.
    """
    slots = shard.slots_by_id(topk_ids)
    num_slots = shard.linears.num_slots
    is_local = slots < num_slots
    lowest = slots.amin(dim=1, keepdim=True)
    has_local = lowest < num_slots
    alias = torch.where(has_local, lowest, 0)
    return LocalRouting(
        torch.where(is_local, slots, alias).to(torch.int32),
        torch.where(is_local, topk_weights, 0.0).to(torch.float32),
        has_local,
    )


def fused_rows(tokens: RoutedTokens, shard: ExpertShard, experts: FusedExperts) -> Tensor:
    """fp32 [rows, hidden_size], this rank's weighted sum.

    The kernel would read out of bounds for an id that is not local, and a weight of 0 would
    still let the NaN of a foreign expert through: it gets the local (row, expert) pairs only.
    """
    hidden_states, local = tokens.hidden_states, tokens.local
    num_rows, top_k = tokens.topk_ids.shape
    if local is not None and num_rows <= experts.max_aliased_rows:
        values = experts.fused(hidden_states, local.slots, local.weights)
        return torch.where(local.has_local, values, 0.0).float()
    if num_rows == 1:
        return _one_row(tokens, shard, experts)
    slots = shard.slots_by_id(tokens.topk_ids).flatten()
    ordered, order = slots.sort(stable=True)
    num_pairs = int((ordered < shard.linears.num_slots).sum())
    if shard.holds_all_experts and 0 < num_pairs == slots.numel() <= MAX_PAIRS:
        local_slots = slots.view(-1, top_k).to(torch.int32)
        return experts.fused(hidden_states, local_slots, tokens.topk_weights.float()).float()
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    weights = tokens.topk_weights.flatten()
    # Sorted by expert, a part has few experts with all their rows: nearly none is read twice.
    for pairs in order[:num_pairs].split(MAX_PAIRS):
        if pairs.numel() == 0:
            continue
        rows = pairs // top_k
        values = experts.fused(
            hidden_states.index_select(0, rows),
            slots.index_select(0, pairs).to(torch.int32)[:, None],
            weights.index_select(0, pairs).float()[:, None],
        )
        total.index_add_(0, rows, values.float())
    return total


def _one_row(tokens: RoutedTokens, shard: ExpertShard, experts: FusedExperts) -> Tensor:
    weight_of = one_row_weights(tokens, shard)
    if not weight_of:
        return torch.zeros_like(tokens.hidden_states, dtype=torch.float32)
    slots = torch.tensor([list(weight_of)], dtype=torch.int32)
    weights = torch.tensor([list(weight_of.values())], dtype=torch.float32)
    return experts.fused(tokens.hidden_states, slots, weights).float()
