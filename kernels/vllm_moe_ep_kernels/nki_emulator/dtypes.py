"""Number formats and the casts between them."""

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from vllm_moe_ep_kernels.nki_emulator.rules import require

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
# The older IEEE-style format with infinities: its largest number is 240.
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
uint16 = np.dtype(np.uint16)
uint8 = np.dtype(np.uint8)

FP8 = (float8_e4m3, float8_e5m2)
FLOATS = (float32, float16, bfloat16, *FP8)
INTEGERS = (int32, uint32, uint16, uint8)
ALL = FLOATS + INTEGERS

# A table is several times faster than ml_dtypes' own cast of fp8.
_FP8_TABLES = {
    dtype: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for dtype in FP8
}
_LARGEST = {dtype: float(ml_dtypes.finfo(dtype).max) for dtype in (bfloat16, float16, *FP8)}


def to_float32(values: NDArray) -> NDArray[np.float32]:
    """What an engine's fp32 datapath sees."""
    if values.dtype in FP8:
        return _FP8_TABLES[values.dtype][values.view(np.uint8)]
    return values.astype(np.float32)


def from_float32(values: NDArray[np.float32], dtype: np.dtype) -> NDArray:
    """Round fp32 to the nearest number of a format, ties to even.

    Raises:
        NkiRuleError: a number is out of the format's range. Hardware may saturate, or not: that
            is not documented, so a kernel must not rely on it. NaN passes between floats.
    """
    if dtype == float32:
        return values
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        in_range = (values >= limits.min) & (values <= limits.max)
        require(bool(in_range.all()), f"A number that does not fit {dtype} was cast to it.")
        return np.rint(values).astype(np.int64).astype(dtype)
    in_range = ~(np.abs(values) > _LARGEST[dtype])
    require(
        bool(in_range.all()),
        f"A number beyond {_LARGEST[dtype]:g} was cast to {dtype}: clamp or scale it first.",
    )
    return values.astype(dtype)
