"""Quantised numbers of a checkpoint as numbers that Trainium2 has, once at load."""

import numpy as np
from numpy.typing import NDArray

_LARGEST_E8M0 = 254
_NAN_E8M0 = 255
_NAN_E4M3 = 0x7F
# So many powers of two below its scale, no e4m3 number leaves anything.
_VANISHING_SHIFT = 20
# Unpacked FP4 numbers are e5m2 bit patterns of 2**-14 times the number.
FP4_SHIFT = 14


def fit_to_240(
    codes: NDArray[np.uint8], scale: NDArray, block_size: tuple[int, int], name: str = "a weight"
) -> tuple[NDArray[np.uint8], NDArray, int]:
    """Halve the blocks that hold a number above 240, and double their scales.

    Halving is exact but for odd codes below 16, which round to even. Returns how many did.

    Raises:
        ValueError: a scale is no finite number, or is none once doubled; says where, in ``name``.
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
        check_e8m0(scale, doubled.astype(np.int64), name)
        return fitted, (scale + doubled).astype(np.uint8), int(is_inexact.sum())
    return fitted, _doubled(scale, doubled, name), int(is_inexact.sum())


def expand_fp4(
    values: NDArray[np.uint8], scale: NDArray[np.uint8], name: str = "a weight"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """FP4 with a scale per 32 columns as e4m3 bytes with one UE8M0 scale per 128: twice the bytes.

    Exact while the four scales lie within 13 powers of two; what does not is rounded and counted.

    Args:
        values: uint8 [experts, n, k / 2]; scale: UE8M0 [experts, n, k / 32], k a multiple of 128.
    """
    halves = np.array([0, 1, 2, 3, 4, 6, 8, 12])
    codes = np.stack([values & 0xF, values >> 4], axis=-1).reshape(*values.shape[:2], -1)
    check_e8m0(scale, np.array(FP4_SHIFT), name)
    # The largest number, 6, becomes 192; 0.5 becomes 16 times 2**-down, a subnormal from 2**-7 on.
    expanded, base, num_inexact = _with_one_scale_of_four(
        (codes & 7).astype(np.uint8), halves * 16.0, scale
    )
    return (expanded | (codes & 8) << 4).astype(np.uint8), (base - 5).clip(0), num_inexact


def join_scales(
    codes: NDArray[np.uint8], scale: NDArray[np.uint8], name: str = "a weight"
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """e4m3 bytes with a scale per 32 columns as e4m3 bytes with one UE8M0 scale per 128.

    The largest of four scales stays. Under the others numbers get smaller: exact but for those that
    lose bits below 2**-9, which are rounded and counted.

    Args:
        codes: OCP e4m3 [experts, n, k]; scale: UE8M0 [experts, n, k / 32], k a multiple of 128.
    """
    check_e8m0(scale, np.array(0), name)
    numbers = _e4m3_numbers(np.arange(_NAN_E4M3 + 1, dtype=np.uint8))
    numbers[_NAN_E4M3] = np.nan
    magnitude = (codes & 0x7F).astype(np.uint8)
    joined, base, num_inexact = _with_one_scale_of_four(magnitude, numbers, scale)
    return (joined | codes & 0x80).astype(np.uint8), base, num_inexact


def _with_one_scale_of_four(
    codes: NDArray[np.uint8], numbers: NDArray, scale: NDArray[np.uint8]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], int]:
    """e4m3 codes under the largest of each four scales, it, and how many numbers round.

    Args:
        codes: [experts, n, k]; numbers: what each code means, 0 or more; NaN stays NaN.
    """
    groups = scale.reshape(*scale.shape[:2], -1, 4)
    base = groups.max(axis=-1)
    down = (base[..., None] - groups).clip(0, _VANISHING_SHIFT).reshape(scale.shape)
    wanted = numbers[:, None] * np.exp2(-np.arange(_VANISHING_SHIFT + 1.0))
    is_nan = np.isnan(wanted)
    table = _e4m3_codes(np.where(is_nan, 0.0, wanted))
    is_inexact = ~is_nan & (_e4m3_numbers(table) != wanted)
    table[is_nan] = _NAN_E4M3
    places = codes, np.repeat(down, 32, axis=-1)
    return table[places], base, int(is_inexact[places].sum())


def shifted(scale: NDArray[np.uint8], shift: int, name: str = "a weight") -> NDArray[np.uint8]:
    """UE8M0 scales times 2**shift.

    Raises:
        ValueError: a scale is NaN, or too large for that.
    """
    check_e8m0(scale, np.array(shift), name)
    return (scale + shift).astype(np.uint8)


def lost_to_zero(codes: NDArray, scale: NDArray, block_size: tuple[int, int]) -> int:
    """Non-zero numbers under a UE8M0 byte 0, which the kernels read as zero, not 2**-127."""
    if scale.dtype != np.uint8 or not (scale == 0).any():
        return 0
    lost = (_by_block(codes, block_size) & 0x7F != 0) & (scale == 0)[:, :, None, :, None]
    return int(lost.sum())


def _e4m3_codes(numbers: NDArray) -> NDArray[np.uint8]:
    """OCP codes of numbers from 0 to 448, ties to even."""
    exponent = np.maximum(np.frexp(np.maximum(numbers, 2.0**-20))[1] - 1, -6)
    steps = np.rint(numbers * np.exp2(3.0 - exponent)).astype(np.int64)
    # Steps 8 to 16 of a binade continue its exponent field, and those below 8 are subnormals.
    return (steps + 8 * (exponent + 6)).astype(np.uint8)


def _e4m3_numbers(codes: NDArray[np.uint8]) -> NDArray:
    exponent = codes.astype(np.int64) >> 3
    mantissa = (codes & 7) + np.where(exponent > 0, 8, 0)
    return mantissa * np.exp2(np.maximum(exponent, 1) - 10.0)


def check_e8m0(scale: NDArray[np.uint8], shift: NDArray, name: str) -> None:
    """That UE8M0 scales are numbers, and still are once times 2**shift.

    Raises:
        ValueError: one is not; says where, in ``name``.
    """
    if scale.dtype != np.uint8:
        raise ValueError(
            f"The scales of {name} must be UE8M0 bytes (uint8), found {scale.dtype}: pass them as "
            "the checkpoint stores them."
        )
    where = _first(scale == _NAN_E8M0)
    if where is not None:
        raise ValueError(
            f"The scale {where} of {name} is NaN (UE8M0 byte 255): the checkpoint is broken; "
            "convert or download it again."
        )
    where = _first(scale.astype(np.int64) + shift > _LARGEST_E8M0)
    if where is not None:
        raise ValueError(
            f"The scale {where} of {name} is too large for Trainium2's fp8, which needs it times a "
            "power of two that UE8M0 cannot hold: serve these weights by the host path."
        )


def _doubled(scale: NDArray, is_doubled: NDArray, name: str) -> NDArray[np.float32]:
    """fp32 scales, some of them times 2."""
    where = _first(~np.isfinite(scale))
    if where is not None:
        raise ValueError(
            f"The scale {where} of {name} is {scale[tuple(where)]}, not a finite number: the "
            "checkpoint is broken; convert or download it again."
        )
    with np.errstate(over="ignore"):
        result = np.where(is_doubled, scale * np.float32(2), scale).astype(np.float32)
    where = _first(~np.isfinite(result))
    if where is not None:
        raise ValueError(
            f"The scale {where} of {name} is {scale[tuple(where)]:g}, over a block with an fp8 "
            "number above 240, where Trainium2's fp8 ends: halving the block takes twice the "
            "scale, which is more than fp32 holds. Serve these weights by the host path."
        )
    return result


def _first(is_bad: NDArray[np.bool_]) -> list[int] | None:
    """Where a mask is first true, or None."""
    found = np.argwhere(is_bad)
    return found[0].tolist() if len(found) else None


def _by_block(codes: NDArray, block_size: tuple[int, int]) -> NDArray:
    """[experts, blocks, block_n, blocks, block_k]; rows of zeros fill the last block."""
    num_experts, n, k = codes.shape
    block_n, block_k = block_size
    padded = np.pad(codes, ((0, 0), (0, -n % block_n), (0, 0)))
    return padded.reshape(num_experts, -1, block_n, k // block_k, block_k)
