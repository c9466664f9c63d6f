"""Weighted sum of each token's expert rows, in the order of its slots."""

import torch
from torch import Tensor


def combine_rows(rows: Tensor, row_of_pair: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """out[t] = the sum over k of topk_weights[t, k] * rows[row_of_pair[t, k]], in fp32.

    Slots without a row are left out by selection, never by a product with 0: the weight there,
    and rows that no pair names, may be NaN. A token without any row becomes 0.

    Args:
        rows: [rows, width], any float dtype.
        row_of_pair: int32 [num_tokens, top_k], -1 for none.
        topk_weights: [num_tokens, top_k], any float dtype.
        out: [num_tokens, width], any float dtype; rounded once.
    """
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(row_of_pair.shape[1]):
        row = row_of_pair[:, slot].long()
        weighted = rows[row.clamp(min=0)].float() * topk_weights[:, slot, None].float()
        total = total + torch.where((row >= 0)[:, None], weighted, 0.0)
    out.copy_(total)
