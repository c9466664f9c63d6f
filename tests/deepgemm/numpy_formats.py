"""Number formats and layouts from their definitions, in numpy and plain loops."""

import math

import numpy as np
import torch


def e4m3_value(byte: int) -> float:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f and 0xff are NaN."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


_MAGNITUDES = np.array([e4m3_value(byte) for byte in range(0x7F)])
_MIDPOINTS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """uint8 codes of the nearest value, ties to the even code; |values| <= 448."""
    magnitude = np.abs(values.astype(np.float64))
    below = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    above = np.searchsorted(_MIDPOINTS, magnitude, side="right")
    code = np.where(below % 2 == 0, below, above)
    return (code + 128 * np.signbit(values)).astype(np.uint8)


def ceil_byte(scale: float) -> int:
    """Smallest b in 0..254 with 2**(b - 127) >= scale, by comparison."""
    return next((byte for byte in range(254) if math.ldexp(1.0, byte - 127) >= scale), 254)


def packed_storage(scale_bytes: np.ndarray) -> np.ndarray:
    """[mn, groups] uint8 -> the raw bytes [words, aligned_mn, 4] of the documented layout."""
    num_rows, num_groups = scale_bytes.shape
    aligned = math.ceil(num_rows / 4) * 4
    raw = np.zeros((math.ceil(num_groups / 4), aligned, 4), dtype=np.uint8)
    for row in range(num_rows):
        for group in range(num_groups):
            raw[group // 4, row, group % 4] = scale_bytes[row, group]
    return raw


def raw_storage(packed: torch.Tensor) -> np.ndarray:
    """The bytes behind an int32 [mn, words] tensor, its gaps included, [words, aligned_mn, 4]."""
    num_rows, num_words = packed.shape
    aligned = math.ceil(num_rows / 4) * 4
    assert packed.dtype == torch.int32 and packed.stride() == (1, aligned)
    whole = packed.as_strided((num_words, aligned), (aligned, 1))
    return whole.contiguous().view(torch.uint8).view(num_words, aligned, 4).numpy()
