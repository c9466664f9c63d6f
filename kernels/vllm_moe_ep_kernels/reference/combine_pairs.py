"""Bring expert rows back to their tokens: a gather and a sum in fixed order, no atomic add."""

import torch
from torch import Tensor


def combine_pairs(
    values: Tensor, row_of_pair: Tensor, is_routed: Tensor, topk_weights: Tensor
) -> Tensor:
    """Weighted sum of each token's expert rows, in the order of its slots, in fp32.

    Slots that select no expert are left out by selection: their rows may hold garbage or NaN,
    which a product with 0 would keep.

    Args:
        values: [rows, hidden_size], any float dtype.
        row_of_pair: int64 [num_tokens * top_k], the row of each (token, slot) pair.
        is_routed: bool [num_tokens, top_k].
        topk_weights: [num_tokens, top_k], any float dtype; unspecified where not routed.

    Returns:
        fp32 [num_tokens, hidden_size].
    """
    num_tokens, top_k = is_routed.shape
    gathered = values[row_of_pair].view(num_tokens, top_k, values.shape[1]).to(torch.float32)
    weighted = gathered * topk_weights.to(torch.float32)[:, :, None]
    return torch.where(is_routed[:, :, None], weighted, 0.0).sum(dim=1)
