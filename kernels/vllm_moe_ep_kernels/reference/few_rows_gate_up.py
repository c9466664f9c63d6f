"""First projection and SwiGLU of each pair's row, stored under the pair's number."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import expand_blocks
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting, local_ids
from vllm_moe_ep_kernels.reference.quantise import quantise
from vllm_moe_ep_kernels.reference.scatter_rows import GROUP_SIZE, MAX_E4M3
from vllm_moe_ep_kernels.reference.swiglu import swiglu


def few_rows_gate_up(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    swiglu_limit: float | None,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    """out[pair] = silu(min(gate, L)) * clamp(up, -L, L) of rows[pair // top_k] @ weight[expert].T.

    Pairs without a local expert leave their rows of `out` untouched.

    Args:
        rows: [num_tokens, k]: bf16, which is cast to fp8 in groups of 128 if the weights are fp8;
            or float8_e4m3fn.
        row_scale: fp32 [num_tokens, k / 128] of fp8 rows, else None.
        weight: [num_local_experts, 2 * n, k], gate rows first: bf16, or float8_e4m3fn.
        weight_scale: fp32 [num_local_experts, 2 * n / 128, k / 128] of fp8 weights, else None.
        routing: of the tokens.
        swiglu_limit: L, or None.
        out: [num_pairs, n]: bf16, or float8_e4m3fn.
        out_scale: fp32 [num_pairs, n / 128] of an fp8 `out`, else None. The numbers are not
            rounded to bf16 before that cast.
    """
    numbers = row_numbers(rows, row_scale, weight_scale is not None)
    local = local_ids(routing)
    for pair in (local >= 0).nonzero().flatten().tolist():
        expert = int(local[pair])
        row = numbers[pair // routing.topk_ids.shape[1]]
        gate_up = weight_numbers(weight, weight_scale, expert) @ row
        ones = torch.ones(1, dtype=torch.float32, device=rows.device)
        activated = swiglu(gate_up[None], ones, swiglu_limit, torch.float32)
        if out_scale is None:
            out[pair] = activated[0].to(out.dtype)
        else:
            values, scale = quantise(activated, (1, GROUP_SIZE), MAX_E4M3, False, False)
            out[pair], out_scale[pair] = values[0], scale[0]


def row_numbers(rows: Tensor, row_scale: Tensor | None, is_fp8: bool) -> Tensor:
    """fp32: what the product sees of the rows."""
    if is_fp8 and row_scale is None:
        rows, row_scale = quantise(rows, (1, GROUP_SIZE), MAX_E4M3, False, False)
    numbers = rows.to(torch.float32)
    if row_scale is None:
        return numbers
    return numbers * row_scale.repeat_interleave(GROUP_SIZE, dim=1)


def weight_numbers(weight: Tensor, weight_scale: Tensor | None, expert: int) -> Tensor:
    """fp32 [n, k] of one expert."""
    numbers = weight[expert].to(torch.float32)
    if weight_scale is None:
        return numbers
    return numbers * expand_blocks(weight_scale[expert], (GROUP_SIZE, GROUP_SIZE), *numbers.shape)
