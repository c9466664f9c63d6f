"""Products of activation rows with one expert's block-quantised weight."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import dequantise


def block_linear(
    rows: Tensor, values: Tensor, scale: Tensor, block_size: tuple[int, int]
) -> Tensor:
    """rows @ weight.T with the weight dequantised to the rows' dtype, summed in fp32.

    Args:
        rows: [rows, k] bf16 or fp32.
        values: [n, k] float8_e4m3fn, or uint8 [n, k / 2] with two FP4 codes a byte.
        scale: [ceil(n / block_n), ceil(k / block_k)] fp32, float8_e8m0fnu or uint8 UE8M0.
        block_size: (block_n, block_k).

    Returns:
        fp32 [rows, n].
    """
    weight = dequantise(values, scale, block_size, rows.dtype)
    return rows.to(torch.float32) @ weight.to(torch.float32).T


def gated_block_linear(
    rows: Tensor, values: Tensor, scale: Tensor, block_size: tuple[int, int], flag: Tensor
) -> Tensor:
    """``block_linear`` where the flag is 1; exact zeros, whatever the weight holds, where it is 0.

    Args:
        flag: int32 [1, 1].
    """
    return torch.where(flag != 0, block_linear(rows, values, scale, block_size), 0.0)
