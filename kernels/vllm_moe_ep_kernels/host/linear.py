"""Products of activation rows with one expert's weight, on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor

_BF16_K = 32
"""Numbers of k in one AMX tile row. oneDNN's GEMM reads whole ones, past the end of a row into the
next: times the zeros that stand there for the weight, and so a NaN of the next row becomes one of
this row (torch 2.13, k no multiple of 4)."""


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T, summed in fp32.

    fp16 is computed in fp32: its products overflow where the weighted sum would not, and from
    four rows on the CPU's fp16 GEMM is also slower than the casts.

    Args:
        rows: [rows, k] in the weight's dtype, or in fp32 with an fp16 weight.
        weight: [n, k] bf16, fp16 or fp32.

    Returns:
        [rows, n]: bf16 for a bf16 weight, else fp32.
    """
    if weight.dtype is torch.float16:
        return F.linear(rows.float(), weight.float())
    if weight.dtype is torch.bfloat16 and weight.shape[1] % _BF16_K:
        missing = -weight.shape[1] % _BF16_K
        return F.linear(F.pad(rows, (0, missing)), F.pad(weight, (0, missing)))
    return F.linear(rows, weight)


@torch.library.custom_op("vllm_moe_ep_kernels::gated_linear", mutates_args=())
def gated_linear(rows: Tensor, weight: Tensor, flag: Tensor) -> Tensor:
    """``linear`` where the flag is 1; zeros without reading the weight where it is 0.

    One opaque op, so that a traced graph holds no branch on data.

    Args:
        flag: int32 [1, 1].
    """
    if flag.item() == 0:
        return torch.zeros_like(_like_output(rows, weight))
    return linear(rows, weight)


@gated_linear.register_fake
def _like_output(rows: Tensor, weight: Tensor, flag: Tensor | None = None) -> Tensor:
    out_dtype = weight.dtype if weight.dtype is torch.bfloat16 else torch.float32
    return rows.new_empty((rows.shape[0], weight.shape[0]), dtype=out_dtype)
