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
    if weight.dtype is torch.bfloat16 and not torch.compiler.is_compiling() and rows.shape[0] == 1:
        return _one_row_bf16(rows, weight)
    return F.linear(rows, weight)


def _one_row_bf16(row: Tensor, weight: Tensor) -> Tensor:
    """One bf16 row, the commonest product of a decode step, by torch's own kernel.

    On x86 with AVX512-BF16 and torch 2.13 it reads the weight 1.5 times as fast as oneDNN does
    and spares its call overhead; both sum in fp32. The flag belongs to the process. It is only
    ever turned back on by a caller that found it on, so concurrent callers cannot leave it off.
    """
    onednn = torch.backends.mkldnn
    if not onednn.enabled:
        return F.linear(row, weight)
    onednn.enabled = False  # type: ignore[assignment]
    try:
        return F.linear(row, weight)
    finally:
        onednn.enabled = True  # type: ignore[assignment]


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
