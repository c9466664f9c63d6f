"""Triton's interpreter with the hardware's rounding, for kernels that multiply.

Its own casts cut bf16 off and lose fp8's subnormal numbers, NaN and carries into the exponent;
its own dot multiplies the bits of bf16 numbers.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_own_convert = interpreter._convert_float


def _convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """The bits of `data`, whose bits or numbers are of type `source`, as of type `target`."""
    if source not in _TORCH or target not in _TORCH:
        return _own_convert(data, source, target, rounding_mode)
    data = np.ascontiguousarray(data)
    bits = torch.from_numpy(data.view(np.uint8).reshape(-1).copy())
    converted = bits.view(_TORCH[source]).to(_TORCH[target]).view(torch.uint8).numpy()
    return converted.view(_BITS[_TORCH[target].itemsize]).reshape(data.shape)


def _dot(
    builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    """Products of the operands' numbers, summed in fp32."""
    left, right = (
        _convert(operand.data, operand.dtype.scalar, tl.float32, None).view(np.float32)
        for operand in (a, b)
    )
    with np.errstate(all="ignore"):
        product = np.matmul(left, right) + d.data
    return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)


def install() -> None:
    """For this process; safe to call again."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
