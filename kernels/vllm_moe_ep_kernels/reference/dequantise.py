"""Values of block-quantised tensors: fp8 e4m3 and packed FP4 e2m1 with fp32 or UE8M0 scales."""

import torch
from torch import Tensor

# e2m1 codes 0 to 7; bit 3 is the sign (OCP Microscaling Formats specification 1.0, table 5).
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# 2**-127 is no normal fp32 number, so that shifting its exponent byte 0 would give zero.
_BITS_OF_BYTE_0 = 0x00400000
_NAN_BITS = 0x7FC00000


def decode_e8m0(codes: Tensor) -> Tensor:
    """fp32 2**(byte - 127) of uint8 bytes, exact; 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, _BITS_OF_BYTE_0, bits)
    return torch.where(codes == 255, _NAN_BITS, bits).to(torch.int32).view(torch.float32)


def decode_scale(scale: Tensor) -> Tensor:
    """fp32 multipliers of scales held as fp32, as float8_e8m0fnu or as uint8 UE8M0 bytes."""
    return scale if scale.dtype is torch.float32 else decode_e8m0(scale.view(torch.uint8))


def decode_fp4(packed: Tensor) -> Tensor:
    """uint8 [..., k / 2] -> fp32 [..., k]; the low nibble is the even element."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
    table = torch.tensor(
        [*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES)], device=packed.device
    )
    return table[codes.to(torch.int64)]


def decode_payload(values: Tensor) -> Tensor:
    """fp32 numbers behind stored values, before their scales."""
    return decode_fp4(values) if values.dtype is torch.uint8 else values.to(torch.float32)


def expand_blocks(per_block: Tensor, block_size: tuple[int, int], n: int, k: int) -> Tensor:
    """[..., ceil(n / block_n), ceil(k / block_k)] -> [..., n, k]; the last blocks may be short."""
    block_n, block_k = block_size
    per_row = per_block.repeat_interleave(block_n, dim=-2)[..., :n, :]
    return per_row.repeat_interleave(block_k, dim=-1)[..., :k]


def dequantise(
    values: Tensor,
    scale: Tensor,
    block_size: tuple[int, int],
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """stored * scale, one fp32 multiplication each, then one rounding to out_dtype.

    Args:
        values: [..., n, k] float8_e4m3fn, or uint8 [..., n, k / 2] with two FP4 codes a byte.
        scale: [..., ceil(n / block_n), ceil(k / block_k)] fp32, float8_e8m0fnu or uint8 UE8M0.
        block_size: (block_n, block_k).
        out_dtype: dtype of the result.

    Returns:
        [..., n, k] in out_dtype.
    """
    numbers = decode_payload(values)
    n, k = numbers.shape[-2:]
    return (numbers * expand_blocks(decode_scale(scale), block_size, n, k)).to(out_dtype)
