"""What every way must compute, in fp32 from the stored weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_moe_ep.bench.way import Way
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.stages import RoutedTokens

ERROR_LIMITS = {"fp8": 0.06, "bf16": 1e-2, "fp32": 1e-5}
"""Relative L2 error by weight format. fp8: activations are rounded twice to 3 mantissa bits."""
_CHECKED_ROWS = 512


def expected(weights: HopperWeights, tokens: RoutedTokens) -> Tensor:
    """fp32 [rows, hidden_size], expert by expert; activations are not rounded."""
    rows = tokens.hidden_states.float()
    total = torch.zeros_like(rows)
    for expert in tokens.topk_ids.unique().tolist():
        hits = tokens.topk_ids == expert
        routed = hits.any(dim=1)
        weight = torch.where(hits, tokens.topk_weights, 0.0).sum(dim=1)[routed, None]
        gate, up = (rows[routed] @ _numbers(weights.w13, expert).T).chunk(2, dim=1)
        total[routed] += weight * ((F.silu(gate) * up) @ _numbers(weights.w2, expert).T)
    return total


def _numbers(weight: Tensor | ScaledWeight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[expert].float()
    scale = weight.scale[expert].repeat_interleave(weight.block_n, 0).repeat_interleave(128, 1)
    return weight.values[expert].float() * scale


def relative_error(way: Way, weights: HopperWeights, tokens: RoutedTokens) -> float:
    """|output - answer| / |answer| over the first rows of the step."""
    output = way(tokens)[:_CHECKED_ROWS].float()
    first = RoutedTokens(
        tokens.hidden_states[:_CHECKED_ROWS],
        tokens.topk_ids[:_CHECKED_ROWS],
        tokens.topk_weights[:_CHECKED_ROWS],
    )
    answer = expected(weights, first)
    return float((output - answer).norm() / answer.norm())
