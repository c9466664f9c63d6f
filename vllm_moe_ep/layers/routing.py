"""Routing ids as one form: int32, with -1 for every id that selects no expert."""

from dataclasses import replace

import torch
from torch import Tensor

from vllm_moe_ep.placement import NO_EXPERT
from vllm_moe_ep.stages import RoutedTokens

# Looked up, since Tensor.is_signed breaks a traced graph.
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def normalise_topk_ids(topk_ids: Tensor, num_experts: int) -> Tensor:
    """int32 ids in [-1, num_experts), whatever integer dtype and stride they came in.

    The range is checked before the cast to int32: 2**32 + 3 must not become expert 3, nor the
    uint32 maximum (another engine's -1) an expert.
    """
    ids = topk_ids.to(torch.int64)
    return torch.where((ids >= 0) & (ids < num_experts), ids, NO_EXPERT).to(torch.int32)


def mask_padding(tokens: RoutedTokens, valid: Tensor) -> RoutedTokens:
    """Rows whose ``valid`` (bool [rows]) is False select no expert and weigh 0."""
    padding = ~valid[:, None]
    ids = tokens.topk_ids
    if ids.dtype not in _SIGNED:
        ids = ids.to(torch.int64)
    return replace(
        tokens,
        topk_ids=ids.masked_fill(padding, NO_EXPERT),
        topk_weights=tokens.topk_weights.masked_fill(padding, 0.0),
        local=None,
    )
