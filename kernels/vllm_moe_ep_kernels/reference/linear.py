"""Products of activation rows with one expert's weight."""

import torch
from torch import Tensor


def linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows @ weight.T, summed in fp32.

    Args:
        rows: [rows, k] in any float dtype, rounded to the weight's dtype first.
        weight: [n, k] bf16, fp16 or fp32.

    Returns:
        fp32 [rows, n].
    """
    return rows.to(weight.dtype).to(torch.float32) @ weight.to(torch.float32).T


def gated_linear(rows: Tensor, weight: Tensor, flag: Tensor) -> Tensor:
    """``linear`` where the flag is 1; exact zeros, whatever the weight holds, where it is 0.

    Args:
        flag: int32 [1, 1].
    """
    return torch.where(flag != 0, linear(rows, weight), 0.0)
