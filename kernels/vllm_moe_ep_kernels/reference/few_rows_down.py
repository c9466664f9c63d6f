"""Second projection of each pair's row: as parts of its sum, or summed over the slots at once."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.few_rows_gate_up import row_numbers, weight_numbers
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting, local_ids
from vllm_moe_ep_kernels.reference.scatter_rows import GROUP_SIZE


def few_rows_down(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    out: Tensor,
) -> None:
    """out[s, pair] = rows[pair] @ weight[expert].T over the s-th part of k.

    The parts are runs of ceil(groups / num_parts) groups of 128 columns; late ones may be empty,
    which gives 0. Pairs without a local expert leave their rows of `out` untouched.

    Args:
        rows: [num_pairs, k]: bf16, which is cast to fp8 in groups of 128 if the weights are fp8;
            or float8_e4m3fn.
        row_scale: fp32 [num_pairs, k / 128] of fp8 rows, else None.
        weight: [num_local_experts, n, k]: bf16, or float8_e4m3fn.
        weight_scale: fp32 [num_local_experts, n / 128, k / 128] of fp8 weights, else None.
        routing: of the tokens.
        out: bf16 or fp32 [num_parts, num_pairs, n].
    """
    local = local_ids(routing)
    num_parts, k = out.shape[0], rows.shape[1]
    part_size = -(-(k // GROUP_SIZE) // num_parts) * GROUP_SIZE
    for pair in (local >= 0).nonzero().flatten().tolist():
        row = row_numbers(rows[pair : pair + 1], _row(row_scale, pair), weight_scale is not None)[0]
        numbers = weight_numbers(weight, weight_scale, int(local[pair]))
        for part in range(num_parts):
            span = slice(part * part_size, (part + 1) * part_size)
            out[part, pair] = (numbers[:, span] @ row[span]).to(out.dtype)


def few_rows_down_combined(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    topk_weights: Tensor,
    out: Tensor,
) -> None:
    """out[token] = the sum over its slots of topk_weights[token, slot] * that pair's product.

    Slots without a local expert are left out by selection: their weights and rows may be NaN.

    Args:
        topk_weights: [num_tokens, top_k], any float dtype.
        out: [num_tokens, n], any float dtype; rounded once.
    """
    local = local_ids(routing)
    num_tokens, top_k = routing.topk_ids.shape
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for pair in (local >= 0).nonzero().flatten().tolist():
        row = row_numbers(rows[pair : pair + 1], _row(row_scale, pair), weight_scale is not None)[0]
        product = weight_numbers(weight, weight_scale, int(local[pair])) @ row
        total[pair // top_k] += topk_weights.flatten()[pair].to(torch.float32) * product
    out.copy_(total)


def _row(row_scale: Tensor | None, pair: int) -> Tensor | None:
    return None if row_scale is None else row_scale[pair : pair + 1]
