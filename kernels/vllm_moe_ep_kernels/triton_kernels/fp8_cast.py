"""fp8 e4m3 with one fp32 scale per group, inside a kernel."""

import triton
import triton.language as tl


@triton.jit
def cast_groups(values):
    """fp32 [groups, size] -> float8_e4m3fn [groups, size] and fp32 scales [groups].

    The scale is the group's abs-max over 448, and at least 2**-126. As bits, NaN is greater than
    infinity and that than any number: a group that holds NaN gets the scale NaN.
    """
    magnitude = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = magnitude.to(tl.float32, bitcast=True) / 448.0
    # Comparisons are false for NaN, which therefore stays, as it does in the values.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    numbers = values * (1.0 / scale)[:, None]
    numbers = tl.where(numbers > 448.0, 448.0, numbers)
    numbers = tl.where(numbers < -448.0, -448.0, numbers)
    return numbers.to(tl.float8e4nv), scale
