"""Routed rows through a grouped kernel that takes only experts of this rank."""

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import FusedExperts
from vllm_moe_ep.layers.ragged_plan import one_row_weights
from vllm_moe_ep.stages import RoutedTokens


def fused_rows(tokens: RoutedTokens, shard: ExpertShard, experts: FusedExperts) -> Tensor:
    """fp32 [rows, hidden_size], this rank's weighted sum.

    The kernel would read out of bounds for an id that is not local, and a weight of 0 would
    still let the NaN of a foreign expert through: it gets the local (row, expert) pairs only.
    """
    if tokens.hidden_states.shape[0] == 1:
        return _one_row(tokens, shard, experts)
    top_k = tokens.topk_ids.shape[1]
    slots = shard.slots_by_id(tokens.topk_ids).flatten()
    pairs = (slots < shard.linears.num_slots).nonzero().squeeze(1)
    if pairs.numel() == 0:
        return _zeros_like(tokens.hidden_states)
    if shard.holds_all_experts and pairs.numel() == slots.numel():
        local_slots = slots.view(-1, top_k).to(torch.int32)
        return experts.fused(tokens.hidden_states, local_slots, tokens.topk_weights.float()).float()
    rows = pairs // top_k
    values = experts.fused(
        tokens.hidden_states.index_select(0, rows),
        slots.index_select(0, pairs).to(torch.int32)[:, None],
        tokens.topk_weights.flatten().index_select(0, pairs).float()[:, None],
    )
    return _zeros_like(tokens.hidden_states).index_add_(0, rows, values.float())


def _one_row(tokens: RoutedTokens, shard: ExpertShard, experts: FusedExperts) -> Tensor:
    weight_of = one_row_weights(tokens, shard)
    if not weight_of:
        return _zeros_like(tokens.hidden_states)
    slots = torch.tensor([list(weight_of)], dtype=torch.int32)
    weights = torch.tensor([list(weight_of.values())], dtype=torch.float32)
    return experts.fused(tokens.hidden_states, slots, weights).float()


def _zeros_like(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows, dtype=torch.float32)
