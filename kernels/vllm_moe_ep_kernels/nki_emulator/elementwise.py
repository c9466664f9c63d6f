"""The vector, scalar and GpSimd engines."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator import dtypes
from vllm_moe_ep_kernels.nki_emulator.enums import Engine
from vllm_moe_ep_kernels.nki_emulator.issue import issue
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import PSUM, SHARED_HBM
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor

_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "not_equal": lambda left, right: np.not_equal(left, right).astype(np.float32),
}
# On unsigned lanes: shifts are logical.
_BITS: dict[str, Callable[[Any, Any], Any]] = {
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
}
_REDUCE = {"add": np.add, "maximum": np.maximum}
_QUADRANT = 32
Operand = float | Tensor


def tensor_copy(dst: Tensor, src: Tensor, engine: Engine = Engine.unknown) -> None:
    """Bit for bit where the dtypes are equal, else through fp32."""
    name = _engine(engine, "vector", ("vector", "scalar", "gpsimd"), dst, src)
    _same_elements(dst, src)
    if not issue(name, "tensor_copy", dst, src):
        return
    values = src.read()
    if dst.dtype != src.dtype:
        values = dtypes.from_float32(dtypes.to_float32(values), dst.dtype)
    _finish(dst, values, name)


def memset(dst: Tensor, value: float, engine: Engine = Engine.unknown) -> None:
    name = _engine(engine, "vector", ("vector", "gpsimd"), dst)
    require(
        (dst.dtype in dtypes.INTEGERS) == isinstance(value, int),
        f"memset of {dst.dtype} with {value!r}: an int for integers, a float for floats.",
    )
    if not issue(name, "memset", dst, value):
        return
    if dst.dtype in dtypes.FLOATS:
        _finish_float(dst, np.full(dst.shape, value, np.float32), name)
    else:
        _finish(dst, np.full(dst.shape, value).astype(dst.dtype), name)


def tensor_copy_predicated(dst: Tensor, src: Tensor, predicate: Tensor) -> None:
    """dst where the predicate is 0, src elsewhere: a selection, which lets no NaN through."""
    name = _engine(Engine.unknown, "vector", ("vector",), dst, src, predicate)
    require(src.dtype == dst.dtype, f"{src.dtype} is selected into {dst.dtype}.")
    require(
        predicate.dtype in (dtypes.uint8, dtypes.uint16, dtypes.uint32),
        f"A predicate is uint8, uint16 or uint32, found {predicate.dtype}.",
    )
    require(not src.buffer == predicate.buffer == PSUM, "src and predicate are both in PSUM.")
    _same_elements(dst, src, predicate)
    if not issue(name, "tensor_copy_predicated", dst, src, predicate):
        return
    chosen = np.where(_shaped(predicate, dst) != 0, _shaped(src, dst), dst.read())
    _finish(dst, chosen, name, num_inputs=2)


def tensor_tensor(
    dst: Tensor, data1: Tensor, data2: Tensor, op: str, engine: Engine = Engine.unknown
) -> None:
    """data1 op data2. All-int32 arithmetic is exact, and GpSimd's; all other is fp32."""
    operands = (data1, data2)
    is_integer = op in _ARITHMETIC and all(
        tensor.dtype in (dtypes.int32, dtypes.uint32) for tensor in (dst, *operands)
    )
    default = "gpsimd" if is_integer else "vector"
    name = _engine(engine, default, ("vector", "gpsimd"), dst, *operands)
    require(op not in _BITS or name == "vector", "Bit operations run on the vector engine alone.")
    require(not is_integer or name == "gpsimd", "Exact int32 arithmetic is GpSimd's.")
    _not_both_psum(*operands)
    _same_elements(dst, *operands)
    lanes = _lanes(dst, *operands) if op in _BITS else None
    require(lanes is not None or op in _ARITHMETIC, f"{op} is no operator of the emulated subset.")
    if not issue(name, f"tensor_tensor {op}", dst, *operands):
        return
    if lanes is not None:
        left, right = (_shaped(tensor, dst).view(lanes) for tensor in operands)
        values = _BITS[op](left, right).view(dst.dtype)
    elif is_integer:
        exact = _ARITHMETIC[op](*(_shaped(tensor, dst).astype(np.int64) for tensor in operands))
        limits = np.iinfo(dst.dtype)
        require(
            bool(((exact >= limits.min) & (exact <= limits.max)).all()),
            f"{op} of {dst.dtype} overflows.",
        )
        values = exact.astype(dst.dtype)
    else:
        left, right = (dtypes.to_float32(_shaped(tensor, dst)) for tensor in operands)
        values = dtypes.from_float32(_ARITHMETIC[op](left, right), dst.dtype)
    _finish(dst, values, name, num_inputs=2)


def tensor_scalar(
    dst: Tensor,
    data: Tensor,
    op0: str,
    operand0: Operand,
    op1: str | None = None,
    operand1: Operand | None = None,
) -> None:
    """(data op0 operand0) op1 operand1, with numbers or one fp32 number a partition."""
    name = _engine(Engine.unknown, "vector", ("vector",), dst, data)
    require((op1 is None) == (operand1 is None), "op1 and operand1 go together.")
    _same_elements(dst, data)
    steps: list[tuple[str, Operand]] = [(op0, operand0)]
    if op1 is not None and operand1 is not None:
        steps.append((op1, operand1))
    is_bits = op0 in _BITS
    require(
        all((op in _BITS) == is_bits for op, _ in steps),
        "tensor_scalar mixes bit operations and arithmetic.",
    )
    lanes = _lanes(dst, data) if is_bits else None
    for op, operand in steps:
        _check_operand(op, operand, dst, lanes)
    if not issue(name, f"tensor_scalar {op0} {op1}", dst, data, operand0, operand1):
        return
    if lanes is not None:
        values = _shaped(data, dst).view(lanes)
        for op, operand in steps:
            values = _BITS[op](values, np.array(operand % 2 ** (8 * lanes.itemsize), lanes))
        _finish(dst, values.view(dst.dtype), name)
        return
    floats = dtypes.to_float32(_shaped(data, dst))
    for op, operand in steps:
        floats = _ARITHMETIC[op](floats, _per_partition(operand, dst))
    _finish_float(dst, floats, name)


def scalar_tensor_tensor(
    dst: Tensor, data: Tensor, op0: str, operand0: Operand, op1: str, operand1: Tensor
) -> None:
    """(data op0 operand0) op1 operand1, in fp32."""
    name = _engine(Engine.unknown, "vector", ("vector",), dst, data, operand1)
    _not_both_psum(data, operand1)
    _same_elements(dst, data, operand1)
    _check_operand(op0, operand0, dst)
    _check_operand(op1, 0.0, dst)
    if not issue(name, f"scalar_tensor_tensor {op0} {op1}", dst, data, operand0, operand1):
        return
    left, right = (dtypes.to_float32(_shaped(tensor, dst)) for tensor in (data, operand1))
    with np.errstate(invalid="ignore"):
        first = _ARITHMETIC[op0](left, _per_partition(operand0, dst))
        second = _ARITHMETIC[op1](first, right)
    _finish(dst, dtypes.from_float32(second, dst.dtype), name, num_inputs=2)


def tensor_reduce(dst: Tensor, op: str, data: Tensor, axis: int) -> None:
    """Reduce the last dimension."""
    name = _engine(Engine.unknown, "vector", ("vector",), dst, data)
    require(op in _REDUCE, f"tensor_reduce with {op} is not in the emulated subset.")
    require(axis == data.data.ndim - 1 > 0, f"tensor_reduce over axis {axis} of {data.shape}.")
    require(
        dst.data.size == data.data.size // data.shape[-1] and dst.shape[0] == data.shape[0],
        f"tensor_reduce of {data.shape} to {dst.shape}.",
    )
    if not issue(name, f"tensor_reduce {op}", dst, data):
        return
    values = _REDUCE[op].reduce(dtypes.to_float32(data.read()), axis=-1, dtype=np.float32)
    # Every element is read once: the input, not the result, sets the time.
    _finish_float(dst, values.reshape(dst.shape), name, data)


def activation(dst: Tensor, op: str, data: Tensor, scale: Operand = 1.0) -> None:
    """op(data * scale) on the scalar engine; hardware approximates functions piecewise."""
    name = _engine(Engine.unknown, "scalar", ("scalar",), dst, data)
    require(op in ("silu", "copy"), f"activation with {op} is not in the emulated subset.")
    _same_elements(dst, data)
    _check_operand("multiply", scale, dst)
    if not issue(name, f"activation {op}", dst, data, scale):
        return
    values = dtypes.to_float32(_shaped(data, dst)) * _per_partition(scale, dst)
    if op == "silu":
        with np.errstate(over="ignore"):
            values = values / (1 + np.exp(-values))
    _finish_float(dst, values, name)


def nc_stream_shuffle(dst: Tensor, src: Tensor, shuffle_mask: Sequence[int]) -> None:
    """Within each 32 partitions, partition i takes what partition shuffle_mask[i] holds."""
    name = _engine(Engine.unknown, "vector", ("vector",), dst, src)
    require(dst.dtype == src.dtype, "nc_stream_shuffle keeps the dtype.")
    require(dst.shape == src.shape, f"nc_stream_shuffle of {src.shape} to {dst.shape}.")
    require(src.shape[0] % _QUADRANT == 0, "nc_stream_shuffle works on 32 partitions each.")
    require(
        len(shuffle_mask) == _QUADRANT and all(0 <= row < _QUADRANT for row in shuffle_mask),
        "shuffle_mask names 32 partitions of 32.",
    )
    if not issue(name, "nc_stream_shuffle", dst, src, list(shuffle_mask)):
        return
    quadrants = range(0, src.shape[0], _QUADRANT)
    sources = [start + row for start in quadrants for row in shuffle_mask]
    picked = {row: src[row].read()[0] for row in set(sources)}
    _finish(dst, np.stack([picked[row] for row in sources]), name)


def _engine(choice: Engine, default: str, allowed: tuple[str, ...], *tensors: Tensor) -> str:
    """The engine that runs it, after checks of where the operands are."""
    name = default if choice is Engine.unknown else choice.value
    require(name in allowed, f"The {name} engine cannot run this, but {', '.join(allowed)}.")
    for tensor in tensors:
        require(tensor.buffer != SHARED_HBM, "Compute engines reach SBUF and PSUM alone.")
        require(name != "gpsimd" or tensor.buffer != PSUM, "GpSimd cannot reach PSUM.")
    partitions = {tensor.shape[0] for tensor in tensors}
    require(len(partitions) == 1, f"Operands have {sorted(partitions)} partitions.")
    return name


def _same_elements(*tensors: Tensor) -> None:
    counts = {tensor.data.size for tensor in tensors}
    require(len(counts) == 1, f"Operands have {sorted(counts)} elements.")


def _not_both_psum(first: Tensor, second: Tensor) -> None:
    require(not first.buffer == second.buffer == PSUM, "Two operands are in PSUM.")


def _lanes(*tensors: Tensor) -> np.dtype:
    for tensor in tensors:
        require(tensor.dtype in dtypes.INTEGERS, f"Bit operations on {tensor.dtype}.")
    sizes = {tensor.dtype.itemsize for tensor in tensors}
    require(len(sizes) == 1, "Bit operations between integers of different sizes.")
    return np.dtype(f"u{sizes.pop()}")


def _check_operand(op: str, operand: Operand, dst: Tensor, lanes: np.dtype | None = None) -> None:
    """That an operator takes an operand; ``lanes`` are those of bit operations."""
    if lanes is not None:
        require(isinstance(operand, int), f"{op} takes an integer, found {operand!r}.")
        limit = 2 ** (8 * lanes.itemsize)
        require(-limit // 2 <= operand < limit // 2, f"{operand} is no signed number here.")
        return
    require(op in _ARITHMETIC, f"{op} is no arithmetic of the emulated subset.")
    if isinstance(operand, Tensor):
        require(
            operand.shape == (dst.shape[0], 1) and operand.dtype == dtypes.float32,
            f"An operand per partition is ({dst.shape[0]}, 1) float32, found {operand.shape} "
            f"{operand.dtype}.",
        )


def _shaped(tensor: Tensor, like: Tensor) -> NDArray:
    return tensor.read().reshape(like.shape)


def _per_partition(operand: Operand, dst: Tensor) -> Any:
    if not isinstance(operand, Tensor):
        return np.float32(operand)
    return operand.read().reshape(dst.shape[0], *[1] * (dst.data.ndim - 1))


def _finish_float(dst: Tensor, values: NDArray, name: str, longest: Tensor | None = None) -> None:
    _finish(dst, dtypes.from_float32(values, dst.dtype), name, longest)


def _finish(
    dst: Tensor,
    values: NDArray,
    name: str,
    longest: Tensor | None = None,
    num_inputs: int = 1,
) -> None:
    dst.write(values.reshape(dst.shape))
    core = cores.current()
    source = dst if longest is None else longest
    per_partition = math.prod(source.shape[1:])
    cycles = max(per_partition / trainium2.ELEMENTS_PER_CYCLE, trainium2.MIN_CYCLES)
    core.counts.add(name, cycles, source.data.size)
    if name == "vector":
        narrow = max(num_inputs * per_partition, trainium2.MIN_CYCLES)
        core.counts.narrow_vector_cycles += narrow
