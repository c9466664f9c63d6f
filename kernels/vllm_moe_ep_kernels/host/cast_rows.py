"""Activation rows to fp8 and back, for a transfer between the two, each as one op of a graph.

Opaque for the reason given in ``quantise_dequantise``, which the two in a row equal.
"""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.host.dequantise import dequantise
from vllm_moe_ep_kernels.reference.quantise import quantise


@torch.library.custom_op("vllm_moe_ep_kernels::quantise_rows", mutates_args=())
def quantise_rows(
    rows: Tensor, block_k: int, max_value: float, is_power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Each row in blocks of ``block_k`` numbers with a scale of their own.

    Args:
        rows: [rows, k], any float dtype.
        block_k, max_value, is_power_of_two: as for the reference's ``quantise``.

    Returns:
        float8_e4m3fn [rows, k], and scales [rows, ceil(k / block_k)], fp32 or uint8 UE8M0.
    """
    return quantise(rows, (1, block_k), max_value, is_power_of_two, is_fp4=False)


@quantise_rows.register_fake
def _like_stored(
    rows: Tensor, block_k: int, max_value: float, is_power_of_two: bool
) -> tuple[Tensor, Tensor]:
    scale_dtype = torch.uint8 if is_power_of_two else torch.float32
    num_blocks = -(-rows.shape[1] // block_k)
    return (
        rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn),
        rows.new_empty((rows.shape[0], num_blocks), dtype=scale_dtype),
    )


@torch.library.custom_op("vllm_moe_ep_kernels::dequantise_rows", mutates_args=())
def dequantise_rows(values: Tensor, scale: Tensor, block_k: int) -> Tensor:
    """fp32 [rows, k] of what ``quantise_rows`` stored; both parts may be strided."""
    return dequantise(values, scale, (1, block_k))


@dequantise_rows.register_fake
def _like_rows(values: Tensor, scale: Tensor, block_k: int) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)
