"""Weighted sum of each token's pairs, in the order of slots and then of parts."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting, local_ids


def few_rows_combine(
    parts: Tensor, routing: PairRouting, topk_weights: Tensor, out: Tensor
) -> None:
    """out[t] = the sum over k of topk_weights[t, k] * (the sum over s of parts[s, t * top_k + k]).

    Slots without a local expert are left out by selection, never by a product with 0: the weight
    there, and the rows of such pairs, may be NaN. A token without any becomes 0.

    Args:
        parts: [num_parts, num_pairs, width], any float dtype.
        routing: its tiles are not read.
        topk_weights: [num_tokens, top_k], any float dtype.
        out: [num_tokens, width], any float dtype; the sums are fp32, rounded once.
    """
    num_tokens, top_k = routing.topk_ids.shape
    is_local = (local_ids(routing) >= 0).view(num_tokens, top_k)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for slot in range(top_k):
        rows = torch.zeros_like(total)
        for part in parts:
            rows = rows + part.view(num_tokens, top_k, -1)[:, slot].to(torch.float32)
        weighted = rows * topk_weights[:, slot, None].to(torch.float32)
        total = total + torch.where(is_local[:, slot, None], weighted, 0.0)
    out.copy_(total)
