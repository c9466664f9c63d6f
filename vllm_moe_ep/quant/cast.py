"""Quantise and dequantise, per format; the arithmetic is that of the kernels' reference."""

import torch
from torch import Tensor

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.host import cast_rows
from vllm_moe_ep_kernels.host import quantise_dequantise as quantise_dequantise_host
from vllm_moe_ep_kernels.reference import dequantise as dequantise_reference
from vllm_moe_ep_kernels.reference import quantise as quantise_reference


def quantise(values: Tensor, fmt: QuantFormat) -> Quantised:
    """Store [..., n, k] numbers of any float dtype in a format.

    A block's scale is its abs-max over the format's largest number, rounded up to a power of two
    for UE8M0, and never zero. A block with NaN or infinity becomes NaN as a whole.

    Raises:
        ValueError: k is odd, and the format packs two numbers a byte.
    """
    if values.shape[-1] % fmt.values_per_byte:
        raise ValueError(
            f"{fmt.name} packs {fmt.values_per_byte} numbers a byte, so the last dimension must "
            f"be a multiple of it; found {values.shape[-1]}."
        )
    stored, scale = quantise_reference.quantise(
        values, fmt.block_size, fmt.max_value, fmt.is_power_of_two, fmt.is_fp4
    )
    return Quantised(stored, scale, fmt.block_size)


def dequantise(quantised: Quantised, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., n, k]: stored * scale in fp32, rounded once to out_dtype."""
    return dequantise_reference.dequantise(
        quantised.values, quantised.scale, quantised.block_size, out_dtype
    )


def quantise_rows(rows: Tensor, fmt: QuantFormat) -> Quantised:
    """``quantise`` for [rows, k] activations in an fp8 format with scales per row; traceable."""
    block_k = fmt.block_size[1]
    stored, scale = cast_rows.quantise_rows(rows, block_k, fmt.max_value, fmt.is_power_of_two)
    return Quantised(stored, scale, fmt.block_size)


def dequantise_rows(rows: Quantised) -> Tensor:
    """fp32 [rows, k] of what ``quantise_rows`` stored; traceable."""
    return cast_rows.dequantise_rows(rows.values, rows.scale, rows.block_size[1])


def quantise_dequantise(values: Tensor, fmt: QuantFormat) -> Tensor:
    """fp32 numbers that the format keeps of ``values``, same shape."""
    return quantise_dequantise_host.quantise_dequantise(
        values, fmt.block_size, fmt.max_value, fmt.is_power_of_two, fmt.is_fp4
    )
