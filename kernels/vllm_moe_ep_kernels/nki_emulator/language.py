"""``nki.language``, as far as the kernels use it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator import dtypes
from vllm_moe_ep_kernels.nki_emulator.core import Scope
from vllm_moe_ep_kernels.nki_emulator.registers import VirtualRegister
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import PSUM, SBUF, SHARED_HBM, Storage
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor

sbuf, psum, shared_hbm = SBUF, PSUM, SHARED_HBM

float32, float16, bfloat16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
float8_e4m3, float8_e5m2 = dtypes.float8_e4m3, dtypes.float8_e5m2
int32, uint32, uint8 = dtypes.int32, dtypes.uint32, dtypes.uint8

add, subtract, multiply, maximum, minimum = "add", "subtract", "multiply", "maximum", "minimum"
not_equal = "not_equal"
bitwise_and, bitwise_or = "bitwise_and", "bitwise_or"
left_shift, right_shift = "left_shift", "right_shift"
silu, copy = "silu", "copy"


def ndarray(shape: tuple[int, ...], dtype: np.dtype, buffer: str = sbuf, name: str = "") -> Tensor:
    """A tensor without contents: reading it before it is written is an error."""
    require(dtype in dtypes.ALL, f"{dtype} is no dtype of the emulated subset.")
    label = name or f"a {buffer} tensor {tuple(shape)} {dtype}"
    core = cores.current()
    require(buffer in (SBUF, PSUM, SHARED_HBM), f"{buffer} is no memory of the emulated subset.")
    require(buffer != SHARED_HBM or not core.in_loop, "HBM tensors are allocated outside of loops.")
    return Tensor.of(Storage(tuple(shape), dtype, buffer, label, core))


def program_id(axis: int) -> int:
    require(axis == 0, "The grid of cores has one axis.")
    return cores.current().index


def num_programs(axes: int) -> int:
    require(axes == 0, "The grid of cores has one axis.")
    return cores.current().num_cores


def fori_loop(
    lower: int | VirtualRegister,
    upper: int | VirtualRegister,
    body_fun: Callable[[VirtualRegister], Any],
    step: int = 1,
) -> None:
    """A loop whose trip count the device decides.

    The body is compiled once, so every trip must issue the same instructions; what it allocates
    ends with the trip.
    """
    core = cores.current()
    start, stop = (
        bound.value if isinstance(bound, VirtualRegister) else bound for bound in (lower, upper)
    )
    trips = range(start, stop, step)
    core.counts.trips.append(len(trips))
    first: list[str] | None = None
    for number in trips:
        scope = Scope()
        core.scopes.append(scope)
        result = body_fun(VirtualRegister(number))
        core.scopes.pop()
        scope.is_alive = False
        require(result is None, "A loop body returns nothing.")
        first = scope.trace if first is None else first
        require(scope.trace == first, "Two trips of a loop issued different instructions.")
    # The loop as a whole is one step of the loop around it.
    core.scope.trace.append("fori_loop")
