"""Casts to block-quantised tensors: fp8 e4m3 and packed FP4 e2m1, scales plain or powers of two."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import expand_blocks

# Exponent bytes of scales. Between these both the scale and its inverse are normal fp32 numbers.
_MIN_EXPONENT, _NAN_EXPONENT = 1, 255
MIN_SCALE = 2.0**-126
# Midpoints between neighbouring FP4 magnitudes. A tie goes to the even code: upwards from an odd
# code, which the next smaller fp32 number as a boundary achieves.
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_up_exponent(scale: Tensor) -> Tensor:
    """int32 UE8M0 exponent bytes of the next power of two at or above positive fp32 scales.

    Bit arithmetic: the exponent field, plus one where any mantissa bit is set. At least 1, so
    that no scale is zero; infinity and NaN give 255, which is NaN.
    """
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return exponent.clamp(_MIN_EXPONENT, _NAN_EXPONENT)


def power_of_two(exponent: Tensor) -> Tensor:
    """fp32 2**(byte - 127) of int32 exponent bytes from 1 to 254; 255 gives NaN."""
    return torch.where(exponent == _NAN_EXPONENT, torch.nan, (exponent << 23).view(torch.float32))


def block_scale(
    values: Tensor, block_size: tuple[int, int], max_value: float, is_power_of_two: bool
) -> Tensor:
    """The abs-max of each block over max_value, rounded up to a power of two where asked.

    Never zero (at least 2**-126). NaN or infinite where the block holds such a number, so that
    all of the block comes back as NaN.

    Args:
        values: [..., n, k], any float dtype.
        block_size: (block_n, block_k); the last blocks may be short.
        max_value: largest number of the stored format.
        is_power_of_two: round the scales up.

    Returns:
        fp32 [..., ceil(n / block_n), ceil(k / block_k)].
    """
    block_n, block_k = block_size
    n, k = values.shape[-2:]
    magnitude = F.pad(values.to(torch.float32).abs(), (0, -k % block_k, 0, -n % block_n))
    blocks = magnitude.unflatten(-1, (-1, block_k)).unflatten(-3, (-1, block_n))
    scale = (blocks.amax(dim=(-3, -1)) / max_value).clamp(min=MIN_SCALE)
    return power_of_two(round_up_exponent(scale)) if is_power_of_two else scale


def encode_fp8(numbers: Tensor, max_value: float) -> Tensor:
    """Nearest e4m3 number, ties to even, at most max_value; NaN stays NaN and -0 stays -0."""
    return numbers.clamp(-max_value, max_value).to(torch.float8_e4m3fn)


def encode_fp4(numbers: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to even, packed: [..., k] -> uint8 [..., k / 2], k even.

    Larger numbers become 6. The format has no NaN: a NaN block is marked by its scale alone.
    """
    boundaries = torch.tensor(_FP4_MIDPOINTS, device=numbers.device)
    zero = torch.zeros(1, device=numbers.device)
    boundaries[1::2] = torch.nextafter(boundaries[1::2], zero)
    codes = torch.bucketize(numbers.abs().nan_to_num(0.0), boundaries).to(torch.uint8)
    codes = codes | (torch.signbit(numbers).to(torch.uint8) << 3)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def quantise(
    values: Tensor,
    block_size: tuple[int, int],
    max_value: float,
    is_power_of_two: bool,
    is_fp4: bool,
) -> tuple[Tensor, Tensor]:
    """Stored values and scales: each number over its block's scale, rounded once to the format.

    Args:
        values: [..., n, k], any float dtype; taken as fp32.
        block_size: (block_n, block_k).
        max_value: largest number of the stored format: 448 or 240 for fp8, 6 for FP4.
        is_power_of_two: whether scales are UE8M0.
        is_fp4: packed FP4 instead of fp8.

    Returns:
        float8_e4m3fn [..., n, k] or uint8 [..., n, k / 2]; and scales
        [..., ceil(n / block_n), ceil(k / block_k)], uint8 UE8M0 bytes or fp32.
    """
    values = values.to(torch.float32)
    scale = block_scale(values, block_size, max_value, is_power_of_two)
    numbers = values / expand_blocks(scale, block_size, *values.shape[-2:])
    stored = encode_fp4(numbers) if is_fp4 else encode_fp8(numbers, max_value)
    if is_power_of_two:
        return stored, round_up_exponent(scale).to(torch.uint8)
    return stored, scale
