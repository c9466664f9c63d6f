"""Values of block-quantised tensors, on the CPU; see the reference of the same name.

Numbers come from tables of all 256 bytes: several times faster than torch's own cast from fp8,
and equal to the reference bit for bit.
"""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import decode_payload, decode_scale, expand_blocks

_BYTES = torch.arange(256, dtype=torch.uint8)
# bf16 holds every number of both formats. An FP4 byte stands for two, read as one int32.
_FP8_TABLE = decode_payload(_BYTES.view(torch.float8_e4m3fn)).to(torch.bfloat16)
_FP4_TABLE = decode_payload(_BYTES[:, None]).to(torch.bfloat16).view(torch.int32).flatten()


def dequantise(
    values: Tensor,
    scale: Tensor,
    block_size: tuple[int, int],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """stored * scale, one fp32 multiplication each, then one rounding to out_dtype.

    Args:
        values: [n, k] float8_e4m3fn, or uint8 [n, k / 2] with two FP4 codes a byte.
        scale: [ceil(n / block_n), ceil(k / block_k)] fp32, float8_e8m0fnu or uint8 UE8M0.
        block_size: (block_n, block_k).
        out_dtype: dtype of the result.

    Returns:
        [n, k] in out_dtype.
    """
    numbers = _decode(values).to(torch.float32)
    n, k = numbers.shape
    block_n, block_k = block_size
    multiplier = decode_scale(scale)
    if k % block_k:
        return (numbers * expand_blocks(multiplier, block_size, n, k)).to(out_dtype)
    per_row = multiplier.repeat_interleave(block_n, dim=0)[:n]
    numbers.view(n, k // block_k, block_k).mul_(per_row[:, :, None])
    return numbers.to(out_dtype)


def _decode(values: Tensor) -> Tensor:
    """bf16 [n, k]."""
    codes = values.view(torch.uint8).flatten().to(torch.int32)
    if values.dtype is torch.uint8:
        numbers = _FP4_TABLE.index_select(0, codes).view(torch.bfloat16)
        return numbers.view(values.shape[0], 2 * values.shape[1])
    return _FP8_TABLE.index_select(0, codes).view(values.shape)
