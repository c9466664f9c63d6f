"""Weights as the kernels read them, made once at load.

A weight [n, k] is cut into blocks of 128 x 128. Within a block k is the partition, so that the
block is a matmul's stationary operand as it lies. One DMA moves a panel: some blocks along n with
all their blocks along k.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_moe_ep_kernels.nki.convert import (
    FP4_SHIFT,
    fit_to_240,
    join_scales,
    lost_to_zero,
    shifted,
)

BLOCK = 128
# A panel's bytes per partition: DMA reaches its bandwidth from the first number on.
_WANTED_PANEL_BYTES = 4096
_MAX_PANEL_BYTES = 16384


@dataclass(frozen=True, slots=True)
class PreparedWeight:
    """One or more matrices [n, k] in the kernels' layout.

    Attributes:
        codes: uint8 [experts, k_parts, panels, 128, panel bytes]. fp8: [panel blocks, blocks of k,
            128 n]. FP4: the same with half as many blocks, each byte a number of two blocks.
        scales: for blocks of 128 rows, fp32 [experts, k_parts, blocks of n * units]; for scales
            per row [experts, k_parts, 128, blocks of n * units], fp32 or uint8 UE8M0. A unit is
            as many k as share a scale.
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


def has_span(k: int, columns: int) -> bool:
    """Whether scales may span so many of k columns: 32, or a multiple of 128 that divides them."""
    return k % columns == 0 and (columns == 32 or columns % BLOCK == 0)


def prepare(
    values: NDArray[np.uint8],
    scale: NDArray,
    block_size: tuple[int, int],
    is_fp4: bool,
    num_cores: int = 2,
    k_parts: int = 1,
    is_interleaved: bool = False,
    name: str = "a weight",
) -> PreparedWeight:
    """Convert and lay out a stack of quantised matrices.

    fp8 numbers with a UE8M0 scale per 32 columns get one per 128 where that changes no number: the
    kernels take a quarter of the partial sums then.

    Args:
        values: OCP e4m3 bytes [experts, n, k], or FP4 [experts, n, k / 2], low nibble first.
        scale: fp32 or uint8 UE8M0 [experts, ceil(n / block_n), k / block_k].
        block_size: (block_n, block_k), block_k as ``has_span`` wants it for one part of k.
        is_fp4: what values are.
        num_cores: physical cores of a logical core, among which blocks of n are shared out.
        k_parts: parts of k that are read separately: num_cores for the down weight of an expert.
        is_interleaved: n is gate above up, whose blocks shall alternate.
        name: of the weight, for errors.

    Raises:
        ValueError: the size does not fit, or a scale is NaN or too large; names the weight.
    """
    num_experts, n = values.shape[:2]
    k = values.shape[2] * (2 if is_fp4 else 1)
    reason = why_not(n, k, num_cores, is_fp4, k_parts)
    if reason is not None:
        raise ValueError(f"No kernel for {name}: {reason}.")
    if not has_span(k // k_parts, block_size[1]):
        raise ValueError(
            f"The scales of {name} must span 32 columns or a multiple of 128 that divides "
            f"{k // k_parts}, found {block_size[1]}."
        )
    if is_fp4:
        codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(num_experts, n, k)
        scale, num_inexact = shifted(scale, FP4_SHIFT, name), 0
    else:
        joined = _joined(values, scale, block_size, name)
        if joined is not None:
            values, scale, block_size = *joined, (1, BLOCK)
        codes, scale, num_inexact = fit_to_240(values, scale, block_size, name)
    order = _block_order(n // BLOCK, is_interleaved)
    return PreparedWeight(
        _lay_out_codes(codes, order, num_cores, k_parts, is_fp4),
        _lay_out_scales(scale, block_size, n, order, k_parts, num_cores),
        n,
        k,
        is_fp4,
        is_interleaved,
        num_inexact + lost_to_zero(codes, scale, block_size),
    )


def _joined(
    values: NDArray[np.uint8], scale: NDArray, block_size: tuple[int, int], name: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """The same numbers under a scale per 128 columns, or None where some would change.

    Expert by expert: what does not join is mostly seen in the first one.
    """
    if block_size != (1, 32) or scale.dtype != np.uint8:
        return None
    codes, scales = [], []
    for expert in range(len(values)):
        one = slice(expert, expert + 1)
        joined, wide, num_inexact = join_scales(values[one], scale[one], name)
        if num_inexact or _num_changed(joined, wide, (1, BLOCK), name) > _num_changed(
            values[one], scale[one], block_size, name
        ):
            return None
        codes.append(joined)
        scales.append(wide)
    return np.concatenate(codes), np.concatenate(scales)


def _num_changed(
    values: NDArray[np.uint8], scale: NDArray, block_size: tuple[int, int], name: str
) -> int:
    """Numbers that fitting to 240 and the kernels' zero scale change."""
    codes, fitted, num_inexact = fit_to_240(values, scale, block_size, name)
    return num_inexact + lost_to_zero(codes, fitted, block_size)


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
    scale: NDArray,
    block_size: tuple[int, int],
    n: int,
    order: NDArray,
    k_parts: int,
    num_cores: int,
) -> NDArray:
    num_experts = len(scale)
    block_n = block_size[0]
    if block_n == BLOCK and block_size[1] >= BLOCK:
        if scale.dtype == np.uint8:
            scale = np.exp2(scale.astype(np.float32) - 127)
        parts = scale[:, order].reshape(num_experts, len(order), k_parts, -1)
        return np.ascontiguousarray(parts.transpose(0, 2, 1, 3)).reshape(num_experts, k_parts, -1)
    per_core = len(order) // num_cores * (scale.shape[2] // k_parts)
    if scale.dtype == np.uint8 and per_core % 4:
        # The kernels decode four bytes at a time. Byte 0 is zero to them.
        scale = np.where(scale == 0, 0.0, np.exp2(scale.astype(np.float32) - 127))
        scale = scale.astype(np.float32)
    rows = np.repeat(scale, block_n, axis=1)[:, :n]
    parts = rows.reshape(num_experts, len(order), BLOCK, k_parts, -1)[:, order]
    parts = parts.transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(parts).reshape(num_experts, k_parts, BLOCK, -1)
