"""Panels of a prepared weight and its scales, brought on chip; FP4 unpacked there."""

from typing import Any

from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128
_QUADRANT = 32
# Bits of an e5m2 number that FP4 has: sign, the two low exponent bits, the high mantissa bit. As
# signed numbers, since they are written into int32 lanes of four bytes.
_SIGN_AND_VALUE = 0x8E8E8E8E - 2**32
_VALUE = 0x0E0E0E0E
_SIGN = 0x80808080 - 2**32


def part_of(tensor: Any, expert: Any, offset: int, pattern: list[list[int]]) -> Any:
    """A part of one expert's entry of an HBM tensor [experts, ...].

    Args:
        expert: a Python int, or an SBUF int32 [1, 1] known at run time alone.
        offset: elements from the start of the expert's entry.
        pattern: [stride, count] pairs, partitions first.
    """
    if isinstance(expert, int):
        size = 1
        for extent in tensor.shape[1:]:
            size = size * extent
        return tensor.ap(pattern=pattern, offset=expert * size + offset)
    return tensor.ap(pattern=pattern, offset=offset, scalar_offset=expert, indirect_dim=0)


def load_panel(codes: Any, expert: Any, k_part: int, panel: int) -> Any:
    """SBUF uint8 [128, panel bytes]."""
    _, _, num_panels, _, width = codes.shape
    tile = nl.ndarray((_P, width), dtype=nl.uint8, buffer=nl.sbuf)
    offset = (k_part * num_panels + panel) * _P * width
    source = part_of(codes, expert, offset, [[width, _P], [1, width]])
    nisa.dma_copy(dst=tile, src=source, dge_mode=nisa.dge_mode.hwdge)
    return tile


def panel_blocks(tile: Any, num_blocks: int, k_blocks: int, is_fp4: bool) -> list[Any]:
    """The panel's blocks of n as matmul operands: fp8 [128, k_blocks, 128] each."""
    if is_fp4:
        first, second = unpack_fp4(tile)
        shape = (_P, num_blocks // 2, k_blocks, _P)
        first, second = first.reshape(shape), second.reshape(shape)
        return [plane[:, pair] for pair in range(num_blocks // 2) for plane in (first, second)]
    numbers = tile.view(nl.float8_e4m3).reshape((_P, num_blocks, k_blocks, _P))
    return [numbers[:, block] for block in range(num_blocks)]


def unpack_fp4(packed: Any) -> tuple[Any, Any]:
    """uint8 [128, w] -> two fp8 e5m2 tiles [128, w], 2**-14 times the numbers.

    Four bytes a lane. The first block's bits already lie in place: one instruction. The second's
    value and sign are moved apart and joined, the joining on the otherwise idle GpSimd engine.
    """
    lanes = packed.view(nl.int32)
    first = nl.ndarray(packed.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=first.view(nl.int32), data=lanes, op0=nl.bitwise_and, operand0=_SIGN_AND_VALUE
    )
    value = nl.ndarray(lanes.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=value,
        data=lanes,
        op0=nl.right_shift,
        operand0=3,
        op1=nl.bitwise_and,
        operand1=_VALUE,
    )
    sign = nl.ndarray(lanes.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=sign, data=lanes, op0=nl.left_shift, operand0=7, op1=nl.bitwise_and, operand1=_SIGN
    )
    second = nl.ndarray(packed.shape, dtype=nl.uint8, buffer=nl.sbuf)
    # No bit is set in both: their sum is their union, and integer sums are exact.
    nisa.tensor_tensor(dst=second.view(nl.int32), data1=value, data2=sign, op=nl.add)
    return first.view(nl.float8_e5m2), second.view(nl.float8_e5m2)


def load_scales(
    scales: Any, expert: Any, k_part: int, first_block: int, num_blocks: int, units: int
) -> Any:
    """SBUF fp32 [128 (n within its block), num_blocks * units]."""
    width = scales.shape[-1]
    count, start = num_blocks * units, first_block * units
    if len(scales.shape) == 3:
        source = part_of(scales, expert, k_part * width + start, [[count, 1], [1, count]])
        return _spread_over_partitions(source, count)
    offset = k_part * _P * width + start
    source = part_of(scales, expert, offset, [[width, _P], [1, count]])
    tile = nl.ndarray((_P, count), dtype=scales.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source, dge_mode=nisa.dge_mode.hwdge)
    return _decode_e8m0(tile) if scales.dtype == nl.uint8 else tile


def _spread_over_partitions(source: Any, count: int) -> Any:
    """One row of HBM on all partitions: read four times, not 128."""
    tile = nl.ndarray((_P, count), dtype=nl.float32, buffer=nl.sbuf)
    for first in range(0, _P, _QUADRANT):
        place = tile[first : first + 1, :]
        nisa.dma_copy(dst=place, src=source, dge_mode=nisa.dge_mode.hwdge)
    nisa.nc_stream_shuffle(dst=tile, src=tile, shuffle_mask=[0] * _QUADRANT)
    return tile


def _decode_e8m0(codes: Any) -> Any:
    """uint8 [128, count], count a multiple of 4 -> fp32 2**(byte - 127); byte 0 gives 0."""
    _, count = codes.shape
    lanes = codes.view(nl.int32)
    decoded = nl.ndarray((_P, count // 4, 4), dtype=nl.float32, buffer=nl.sbuf)
    bits = decoded.view(nl.int32)
    for byte in range(4):
        # Byte ``byte`` of a lane goes to the exponent, bits 23 to 30.
        distance = 23 - 8 * byte
        nisa.tensor_scalar(
            dst=bits[:, :, byte],
            data=lanes,
            op0=nl.left_shift if distance > 0 else nl.right_shift,
            operand0=abs(distance),
            op1=nl.bitwise_and,
            operand1=0x7F800000,
        )
    return decoded.reshape((_P, count))
