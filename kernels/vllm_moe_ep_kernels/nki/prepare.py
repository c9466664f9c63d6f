"""Weights as the kernels read them, made once at load.

A weight [n, k] is cut into blocks of 128 x 128. Within a block k is the partition, so that the
block is a matmul's stationary operand as it lies. One DMA moves a panel: some blocks along n with
all their blocks along k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 128
_LARGEST_E8M0 = 254
_NAN_E8M0 = 255
# A panel's bytes per partition: DMA reaches its bandwidth from the first number on.
_WANTED_PANEL_BYTES = 4096
_MAX_PANEL_BYTES = 16384
# Unpacked FP4 numbers are e5m2 bit patterns of 2**-14 times the number.
_FP4_SHIFT = 14


@dataclass(frozen=True, slots=True)
class PreparedWeight:
    """One or more matrices [n, k] in the kernels' layout.

    Attributes:
        codes: uint8 [experts, k_parts, panels, 128, panel bytes]. fp8: [panel blocks, blocks of k,
            128 n]. FP4: the same with half as many blocks, each byte a number of two blocks.
        scales: for blocks of 128 x 128, fp32 [experts, k_parts, blocks of n * units]; for scales
            per row [experts, k_parts, 128, blocks of n * units], fp32 or uint8 UE8M0. A unit is
            as many k as share a scale: 32 or 128.
        n, k: the size of a matrix.
        is_fp4: packed FP4.
        is_interleaved: blocks alternate between the first and the second half of n (gate and up).
        num_inexact: numbers that the conversion to a largest fp8 number of 240 changed.
    """

    codes: NDArray[np.uint8]
    scales: NDArray
    n: int
    k: int
    is_fp4: bool
    is_interleaved: bool
    num_inexact: int

    @property
    def num_bytes(self) -> int:
        """Codes and scales of one matrix."""
        return (self.codes.nbytes + self.scales.nbytes) // len(self.codes)


def why_not(n: int, k: int, num_cores: int, is_fp4: bool, k_parts: int = 1) -> str | None:
    """Why a weight [n, k] has no kernel, or None."""
    if n % BLOCK or k % BLOCK:
        return f"its size {n} x {k} is not a multiple of {BLOCK}"
    unit = num_cores * (2 if is_fp4 else 1)
    if n // BLOCK % unit:
        return f"its {n // BLOCK} blocks of rows do not divide into {unit}"
    if k // BLOCK % k_parts:
        return f"its {k // BLOCK} blocks of columns do not divide into {k_parts}"
    return None


def prepare(
    values: NDArray[np.uint8],
    scale: NDArray,
    block_size: tuple[int, int],
    is_fp4: bool,
    num_cores: int = 2,
    k_parts: int = 1,
    is_interleaved: bool = False,
) -> PreparedWeight:
    """Convert and lay out a stack of quantised matrices.

    Args:
        values: OCP e4m3 bytes [experts, n, k], or FP4 [experts, n, k / 2], low nibble first.
        scale: fp32 or uint8 UE8M0 [experts, ceil(n / block_n), k / block_k].
        block_size: (block_n, block_k), block_k 32 or 128.
        is_fp4: what values are.
        num_cores: physical cores of a logical core, among which blocks of n are shared out.
        k_parts: parts of k that are read separately: num_cores for the down weight of an expert.
        is_interleaved: n is gate above up, whose blocks shall alternate.

    Raises:
        ValueError: the size does not fit, or a scale is NaN or too large.
    """
    num_experts, n = values.shape[:2]
    k = values.shape[2] * (2 if is_fp4 else 1)
    reason = why_not(n, k, num_cores, is_fp4, k_parts)
    if reason is not None:
        raise ValueError(f"No kernel for this weight: {reason}.")
    if block_size[1] not in (32, BLOCK) or k % block_size[1]:
        raise ValueError(f"Scales span 32 or 128 columns, found {block_size[1]}.")
    if is_fp4:
        codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(num_experts, n, k)
        scale, num_inexact = _shifted(scale, _FP4_SHIFT), 0
    else:
        codes, scale, num_inexact = fit_to_240(values, scale, block_size)
    order = _block_order(n // BLOCK, is_interleaved)
    return PreparedWeight(
        _lay_out_codes(codes, order, num_cores, k_parts, is_fp4),
        _lay_out_scales(scale, block_size, n, order, k_parts),
        n,
        k,
        is_fp4,
        is_interleaved,
        num_inexact + _lost_to_zero(codes, scale, block_size),
    )


def fit_to_240(
    codes: NDArray[np.uint8], scale: NDArray, block_size: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray, int]:
    """Halve the blocks that hold a number above 240, and double their scales.

    Halving is exact but for odd codes below 16, which round to even. Returns how many did.
    """
    grouped = _by_block(codes, block_size)
    magnitude = grouped & 0x7F
    is_above = (magnitude >= 0x78) & (magnitude < 0x7F)
    is_large: NDArray[np.bool_] = np.any(is_above, axis=(2, 4), keepdims=True)
    # Codes below 16 count steps of 2**-9; above, an exponent step is 8 codes.
    halved_small = (magnitude >> 1) + ((magnitude & 1) & (magnitude >> 1 & 1))
    halved = np.where(magnitude < 16, halved_small, magnitude - 8)
    halved = np.where(magnitude == 0x7F, 0x7F, halved) | (grouped & 0x80)
    is_inexact = is_large & (magnitude < 16) & (magnitude & 1 == 1)
    fitted = np.where(is_large, halved, grouped).astype(np.uint8)
    fitted = fitted.reshape(codes.shape[0], -1, codes.shape[2])[:, : codes.shape[1]]
    doubled = is_large[:, :, 0, :, 0]
    if scale.dtype == np.uint8:
        _check_e8m0(scale, doubled.astype(np.int64))
        return fitted, (scale + doubled).astype(np.uint8), int(is_inexact.sum())
    return fitted, np.where(doubled, scale * 2, scale).astype(np.float32), int(is_inexact.sum())


def expand_fp4(
    values: NDArray[np.uint8], scale: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """FP4 with a scale per 32 columns as e4m3 bytes with one UE8M0 scale per 128: twice the bytes.

    Exact while the four scales lie within 13 powers of two; what does not is rounded and counted.

    Args:
        values: uint8 [experts, n, k / 2]; scale: UE8M0 [experts, n, k / 32], k a multiple of 128.
    """
    magnitudes = np.array([0, 1, 2, 3, 4, 6, 8, 12])  # in halves
    codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(*values.shape[:2], -1)
    _check_e8m0(scale, np.array(_FP4_SHIFT))
    groups = scale.astype(np.int64).reshape(*scale.shape[:2], -1, 4)
    base = groups.max(axis=-1)
    down = np.repeat((base[..., None] - groups).reshape(scale.shape), 32, axis=-1)
    # The largest number, 6, becomes 192; 0.5 becomes 16 times 2**-down, a subnormal from 2**-7 on.
    wanted = magnitudes[codes & 7] * 16.0 * np.exp2(-down)
    magnitude = _e4m3_codes(wanted)
    num_inexact = int((_e4m3_numbers(magnitude) != wanted).sum())
    expanded = (magnitude | (codes & 8) << 4).astype(np.uint8)
    return expanded, (base - 5).clip(0).astype(np.uint8), num_inexact


def _e4m3_codes(numbers: NDArray) -> NDArray[np.uint8]:
    """Codes of numbers from 0 to 240, ties to even."""
    exponent = np.maximum(np.frexp(np.maximum(numbers, 2.0**-20))[1] - 1, -6)
    steps = np.rint(numbers * np.exp2(3.0 - exponent)).astype(np.int64)
    # Steps 8 to 16 of a binade continue its exponent field, and those below 8 are subnormals.
    return (steps + 8 * (exponent + 6)).astype(np.uint8)


def _e4m3_numbers(codes: NDArray[np.uint8]) -> NDArray:
    exponent = codes.astype(np.int64) >> 3
    mantissa = (codes & 7) + np.where(exponent > 0, 8, 0)
    return mantissa * np.exp2(np.maximum(exponent, 1) - 10.0)


def _shifted(scale: NDArray[np.uint8], shift: int) -> NDArray[np.uint8]:
    _check_e8m0(scale, np.array(shift))
    return (scale + shift).astype(np.uint8)


def _check_e8m0(scale: NDArray[np.uint8], shift: NDArray) -> None:
    if scale.dtype != np.uint8:
        raise ValueError(f"FP4 weights have UE8M0 scales as uint8, found {scale.dtype}.")
    if (scale == _NAN_E8M0).any() or (scale.astype(np.int64) + shift > _LARGEST_E8M0).any():
        raise ValueError(
            "A UE8M0 scale is NaN, or too large for the kernels' number format: such a checkpoint "
            "is broken or needs the host path."
        )


def _lost_to_zero(codes: NDArray, scale: NDArray, block_size: tuple[int, int]) -> int:
    """Non-zero numbers under a UE8M0 byte 0, which the kernels read as zero, not 2**-127."""
    if scale.dtype != np.uint8 or not (scale == 0).any():
        return 0
    lost = (_by_block(codes, block_size) & 0x7F != 0) & (scale == 0)[:, :, None, :, None]
    return int(lost.sum())


def _by_block(codes: NDArray, block_size: tuple[int, int]) -> NDArray:
    """[experts, blocks, block_n, blocks, block_k]; rows of zeros fill the last block."""
    num_experts, n, k = codes.shape
    block_n, block_k = block_size
    padded = np.pad(codes, ((0, 0), (0, -n % block_n), (0, 0)))
    return padded.reshape(num_experts, -1, block_n, k // block_k, block_k)


def _block_order(num_blocks: int, is_interleaved: bool) -> NDArray[np.int64]:
    order = np.arange(num_blocks)
    return order.reshape(2, -1).T.reshape(-1) if is_interleaved else order


def _lay_out_codes(
    codes: NDArray, order: NDArray, num_cores: int, k_parts: int, is_fp4: bool
) -> NDArray[np.uint8]:
    num_experts, n, k = codes.shape
    per_part = k // BLOCK // k_parts
    blocks = codes.reshape(num_experts, n // BLOCK, BLOCK, k_parts, per_part, BLOCK)[:, order]
    if is_fp4:
        # One block's numbers lie where e5m2 has sign and value; the other's fill the gaps.
        first, second = blocks[:, ::2], blocks[:, 1::2]
        blocks = (first & 8) << 4 | (first & 7) << 1 | (second & 7) << 4 | second >> 3
    # [experts, parts, blocks of n, 128 k, blocks of k, 128 n]
    blocks = blocks.transpose(0, 3, 1, 5, 4, 2)
    panel = panel_blocks(blocks.shape[2] // num_cores, per_part * BLOCK)
    panels = blocks.reshape(num_experts, k_parts, -1, panel, BLOCK, per_part * BLOCK)
    panels = panels.transpose(0, 1, 2, 4, 3, 5)
    return np.ascontiguousarray(panels).reshape(*panels.shape[:4], -1)


def panel_blocks(num_blocks: int, block_bytes: int) -> int:
    """How many of a core's blocks one DMA moves."""
    divisors = [count for count in range(1, num_blocks + 1) if num_blocks % count == 0]
    fitting = [count for count in divisors if count * block_bytes <= _MAX_PANEL_BYTES] or [1]
    enough = [count for count in fitting if count * block_bytes >= _WANTED_PANEL_BYTES]
    return enough[0] if enough else fitting[-1]


def _lay_out_scales(
    scale: NDArray, block_size: tuple[int, int], n: int, order: NDArray, k_parts: int
) -> NDArray:
    num_experts = len(scale)
    block_n = block_size[0]
    if block_n == BLOCK and block_size[1] == BLOCK:
        if scale.dtype == np.uint8:
            scale = np.exp2(scale.astype(np.float32) - 127)
        parts = scale[:, order].reshape(num_experts, len(order), k_parts, -1)
        return np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).reshape(num_experts, k_parts, -1)
    rows = np.repeat(scale, block_n, axis=1)[:, :n]
    parts = rows.reshape(num_experts, len(order), BLOCK, k_parts, -1)[:, order]
    parts = parts.transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(parts).reshape(num_experts, k_parts, BLOCK, -1)
