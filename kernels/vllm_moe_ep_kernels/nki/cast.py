"""Rows cast to fp8 with a power-of-two scale per 32 channels, as the tensor engine reads them."""

from collections.abc import Callable
from typing import Any

from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128
GROUP = 32
# Tiles cast at a time: what is live stays small, and instructions stay long.
BATCH = 16
# 240 is 1.875 * 2**7: an abs-max of m * 2**e, 1 <= m < 2, needs the scale 2**(e - 7) while m <=
# 1.875, else twice that. Added to fp32 bits, this carries into the exponent just then.
_CARRY_ABOVE_1_875 = 0x0FFFFF
_EXPONENT_OF_240 = 7
_INFINITY = 0x7F800000

Fetch = Callable[[Any, int, int, int, int], None]


def load_rows(x: Any) -> Any:
    """HBM [rows, k], any float dtype -> SBUF bf16 [128, k / 128, rows], k mod 128 on partitions.

    The numbers are exactly those of the cast: e4m3 times a power of two is a bf16 number.
    """
    num_rows, k = x.shape
    blocks = x.reshape((num_rows, k // _P, _P))

    def fetch(raw: Any, block: int, num_blocks: int, row: int, rows: int) -> None:
        part = blocks[row : row + rows, block : block + num_blocks, :].permute((1, 0, 2))
        if x.dtype == nl.float32:
            nisa.dma_copy(dst=raw, src=part, dge_mode=nisa.dge_mode.hwdge)
            return
        # The scalar engine casts: DMA inside a loop cannot.
        tile = nl.ndarray(raw.shape, dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=part, dge_mode=nisa.dge_mode.hwdge)
        nisa.tensor_copy(dst=raw, src=tile, engine=nisa.engine.scalar)

    return cast(fetch, num_rows, k // _P)


def cast_transposed(h: Any) -> Any:
    """The same from SBUF fp32 [128, k / 128, rows], without leaving the chip."""
    _, num_blocks, num_rows = h.shape

    def fetch(raw: Any, block: int, num_blocks: int, row: int, rows: int) -> None:
        turned = nl.ndarray((num_blocks * rows, _P), dtype=nl.float32, buffer=nl.psum)
        part = h[:, block : block + num_blocks, row : row + rows]
        nisa.nc_transpose(dst=turned, data=part, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=raw, src=turned, engine=nisa.engine.scalar)

    return cast(fetch, num_rows, num_blocks)


def cast(fetch: Fetch, num_rows: int, num_blocks: int) -> Any:
    """``fetch(dst, block, blocks, row, rows)`` fills dst [blocks * rows, 128] with fp32 rows."""
    out = nl.ndarray((_P, num_blocks, num_rows), dtype=nl.bfloat16, buffer=nl.sbuf)
    tiles = row_tiles(num_rows, num_blocks)
    for start in range(0, len(tiles), BATCH):
        _cast_batch(fetch, tiles[start : start + BATCH], out)
    return out


def row_tiles(num_rows: int, num_blocks: int) -> list[tuple[int, int, int, int]]:
    """(first block, blocks, first row, rows) of tiles with at most 128 (block, row) pairs."""
    tiles = []
    if num_rows <= _P:
        step = _P // num_rows
        for block in range(0, num_blocks, step):
            tiles.append((block, min(step, num_blocks - block), 0, num_rows))
        return tiles
    for block in range(num_blocks):
        for row in range(0, num_rows, _P):
            tiles.append((block, 1, row, min(_P, num_rows - row)))
    return tiles


def _cast_batch(fetch: Fetch, tiles: list[tuple[int, int, int, int]], out: Any) -> None:
    heights = [blocks * rows for _, blocks, _, rows in tiles]
    height, count = max(heights), len(tiles)
    raw = nl.ndarray((height, count, _P), dtype=nl.float32, buffer=nl.sbuf)
    if min(heights) < height:
        nisa.memset(dst=raw, value=0.0, engine=nisa.engine.gpsimd)
    for place, (block, blocks, row, rows) in enumerate(tiles):
        fetch(raw[0 : blocks * rows, place, :], block, blocks, row, rows)
    kept = _quantise_dequantise(raw.reshape((height, count * _P // GROUP, GROUP)))
    kept = kept.reshape((height, count, _P))
    for place, (block, blocks, row, rows) in enumerate(tiles):
        turned = nl.ndarray((_P, blocks * rows), dtype=nl.bfloat16, buffer=nl.psum)
        part = kept[0 : blocks * rows, place, :]
        nisa.nc_transpose(dst=turned, data=part, engine=nisa.engine.tensor)
        place_in_out = out[:, block : block + blocks, row : row + rows]
        nisa.tensor_copy(dst=place_in_out, src=turned, engine=nisa.engine.scalar)


def _quantise_dequantise(raw: Any) -> Any:
    """fp32 [parts, groups, 32] -> bf16 of the same shape: what e4m3 within +-240 keeps."""
    parts, groups, _ = raw.shape
    # Infinities become NaN: what a cast to fp8 makes of them is not documented. Numbers stay.
    nisa.scalar_tensor_tensor(
        dst=raw, data=raw, op0=nl.multiply, operand0=0.0, op1=nl.add, operand1=raw
    )
    magnitude = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=magnitude.view(nl.int32),
        data=raw.view(nl.int32),
        op0=nl.bitwise_and,
        operand0=0x7FFFFFFF,
    )
    amax = nl.ndarray((parts, groups), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=amax, op=nl.maximum, data=magnitude, axis=2)
    scale, inverse = _power_of_two_scales(amax)
    codes = nl.ndarray(raw.shape, dtype=nl.float8_e4m3, buffer=nl.sbuf)
    # Within +-240 by the choice of the scale: no clamp.
    nisa.tensor_tensor(dst=codes, data1=raw, data2=_spread(inverse), op=nl.multiply)
    kept = nl.ndarray(raw.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=kept, data1=codes, data2=_spread(scale), op=nl.multiply)
    return kept


def _spread(per_group: Any) -> Any:
    return per_group.expand_dim(2).broadcast(2, GROUP)


def _power_of_two_scales(amax: Any) -> tuple[Any, Any]:
    """fp32 tiles of 2**ceil(log2(amax / 240)), at least 2**-126, and of its inverse."""
    bits = nl.ndarray(amax.shape, dtype=nl.int32, buffer=nl.sbuf)
    constant = nl.ndarray(amax.shape, dtype=nl.int32, buffer=nl.sbuf)
    # NaN with a large payload would overflow below.
    nisa.memset(dst=constant, value=_INFINITY, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=bits, data1=amax.view(nl.int32), data2=constant, op=nl.minimum)
    nisa.memset(dst=constant, value=_CARRY_ABOVE_1_875, engine=nisa.engine.gpsimd)
    nisa.tensor_tensor(dst=bits, data1=bits, data2=constant, op=nl.add)
    nisa.tensor_scalar(
        dst=bits, data=bits, op0=nl.right_shift, operand0=23, op1=nl.bitwise_and, operand1=0xFF
    )
    exponent = nl.ndarray(amax.shape, dtype=nl.int32, buffer=nl.sbuf)
    # Small integers: fp32 arithmetic on them is exact.
    nisa.tensor_scalar(
        dst=exponent,
        data=bits,
        op0=nl.subtract,
        operand0=float(_EXPONENT_OF_240),
        op1=nl.maximum,
        operand1=1.0,
    )
    opposite = nl.ndarray(amax.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=opposite, data=exponent, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=254.0
    )
    for tile in (exponent, opposite):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=23)
    return exponent.view(nl.float32), opposite.view(nl.float32)
