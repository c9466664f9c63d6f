"""``nki.language``, as far as the kernels use it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator import dtypes
from vllm_moe_ep_kernels.nki_emulator.core import Core, Scope
from vllm_moe_ep_kernels.nki_emulator.registers import VirtualRegister
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import PSUM, SBUF, SHARED_HBM, Storage
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor
from vllm_moe_ep_kernels.nki_emulator.trace import Instruction, check_same

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

    The body is compiled once, so every trace of it must issue the same instructions, whatever
    Python state it meets; what it makes ends with the trip. It is traced even for no trips.
    """
    core = cores.current()
    require(isinstance(step, int) and step > 0, f"A loop's step is a positive int, found {step!r}.")
    bounds = [_bound(bound) for bound in (lower, upper)]
    (_, start), (_, stop) = bounds
    require(
        core.is_dry and not (isinstance(lower, int) and isinstance(upper, int)) or start <= stop,
        f"A loop from {start} to {stop} has a negative number of trips.",
    )
    traced = [_trip(core, body_fun, start, is_dry=True) for _ in range(core.traces_per_loop)]
    for trace in traced[1:]:
        check_same(
            traced[0],
            trace,
            "A loop body issued other instructions when it was traced again: Python state that it "
            "changes cannot choose what a trip does, since the device repeats the first trace.",
        )
    trips = range(start, stop, step)
    if not core.is_dry:
        core.counts.trips.append(len(trips))
        for number in trips:
            trace = _trip(core, body_fun, number, is_dry=False)
            check_same(traced[0], trace, "Two trips of a loop issued different instructions.")
    operands = tuple(name for name, _ in bounds)
    loop = Instruction("loop", f"fori_loop in steps of {step}", operands, tuple(traced[0]))
    core.scope.trace.append(loop)


def _bound(bound: int | VirtualRegister) -> tuple[str, int]:
    """As it stands in a trace, and its number."""
    if isinstance(bound, VirtualRegister):
        return bound.place, bound.number()
    return repr(bound), bound


def _trip(
    core: Core, body_fun: Callable[[VirtualRegister], Any], number: int, is_dry: bool
) -> list[Instruction]:
    """Run the body once, or only trace it."""
    scope = Scope(core.scope.depth + 1)
    core.scopes.append(scope)
    was_dry, core.is_dry = core.is_dry, core.is_dry or is_dry
    result = body_fun(VirtualRegister(core, number))
    core.is_dry = was_dry
    core.scopes.pop()
    scope.is_alive = False
    require(result is None, "A loop body returns nothing.")
    return scope.trace
