"""Products of activation rows with one expert's weight, on the CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor


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
