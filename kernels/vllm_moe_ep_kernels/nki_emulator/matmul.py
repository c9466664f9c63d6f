"""The tensor engine: products and transposes."""

import math

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator import dtypes
from vllm_moe_ep_kernels.nki_emulator.enums import Engine
from vllm_moe_ep_kernels.nki_emulator.issue import issue
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import (
    BY_MATMUL,
    PSUM,
    SBUF,
    WRITTEN,
    pattern,
)
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor

_ARRAY = 128


def nc_matmul(
    dst: Tensor,
    stationary: Tensor,
    moving: Tensor,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
) -> None:
    """dst = stationary.T @ moving, or added to dst; fp32 sums in an order of its own.

    ``accumulate`` must be given: left out, the compiler decides by what a PSUM location has seen,
    which inside a loop is not what one trip shows.
    """
    require(accumulate is not None, "nc_matmul: say whether to accumulate.")
    rows = _tile_rows(tile_position, tile_size, stationary.shape[0])
    _check_operands(stationary, moving, rows)
    num_moving = math.prod(moving.shape[1:])
    _check_result(dst, math.prod(stationary.shape[1:]), num_moving)
    if not issue(
        "tensor", "nc_matmul", dst, stationary, moving, accumulate, tile_position, tile_size
    ):
        return
    product = (
        dtypes.to_float32(stationary.read()).reshape(stationary.shape[0], -1).T
        @ dtypes.to_float32(moving.read()).reshape(moving.shape[0], -1)
    ).reshape(dst.shape)
    if accumulate:
        by_matmul = pattern(BY_MATMUL, dst.marks.itemsize)
        require(
            bool((dst.marks & by_matmul == by_matmul).all()),
            "nc_matmul accumulates onto PSUM that no matmul wrote.",
        )
        product = product + dst.read()
    dst.write(product, WRITTEN | BY_MATMUL)
    passes = trainium2.FP32_MATMUL_PASSES if moving.dtype == dtypes.float32 else 1
    _count(passes * num_moving, rows)


def nc_transpose(dst: Tensor, data: Tensor, engine: Engine = Engine.unknown) -> None:
    """Partitions and free elements change places, bit for bit; on the tensor engine."""
    require(engine is Engine.tensor, "nc_transpose is emulated on the tensor engine alone.")
    require(
        data.buffer == SBUF and dst.buffer == PSUM, "The tensor engine transposes SBUF to PSUM."
    )
    require(dst.dtype == data.dtype, f"nc_transpose keeps the dtype: {data.dtype}, {dst.dtype}.")
    num_moving = math.prod(data.shape[1:])
    require(
        num_moving <= _ARRAY and dst.shape == (num_moving, data.shape[0]),
        f"nc_transpose of {data.shape} to {dst.shape}: at most 128 x 128.",
    )
    _check_bank(dst)
    if not issue("tensor", "nc_transpose", dst, data):
        return
    dst.write(data.read().reshape(data.shape[0], -1).T)
    # The identity matrix moves: as many columns as the data has partitions.
    passes = trainium2.FP32_TRANSPOSE_PASSES if data.dtype == dtypes.float32 else 1
    _count(passes * data.shape[0], _ARRAY)


def _tile_rows(position: tuple[int, ...], size: tuple[int, ...], num_rows: int) -> int:
    """Rows of the array that a matmul occupies."""
    require(bool(position) == bool(size), "tile_position and tile_size go together.")
    if not size:
        return _ARRAY
    require(
        size[1] == _ARRAY and position[1] == 0 and size[0] in (32, 64, 128),
        f"Row tiles alone, of 32, 64 or 128 rows: found {size} at {position}.",
    )
    require(
        position[0] % size[0] == 0 and position[0] + size[0] <= _ARRAY,
        f"A row tile of {size[0]} cannot start at row {position[0]}.",
    )
    require(num_rows <= size[0], f"{num_rows} rows in a row tile of {size[0]}.")
    return size[0]


def _check_operands(stationary: Tensor, moving: Tensor, tile_rows: int) -> None:
    for name, operand in (("stationary", stationary), ("moving", moving)):
        require(operand.buffer == SBUF, f"nc_matmul reads {name} from SBUF.")
        require(operand.dtype in dtypes.FLOATS, f"nc_matmul: {name} is {operand.dtype}.")
    require(
        (stationary.dtype == dtypes.float32) == (moving.dtype == dtypes.float32),
        f"nc_matmul: float32 goes with float32 alone: {stationary.dtype}, {moving.dtype}.",
    )
    require(
        stationary.shape[0] == moving.shape[0] <= tile_rows,
        f"nc_matmul contracts equal partitions: {stationary.shape}, {moving.shape}.",
    )
    require(
        math.prod(stationary.shape[1:]) <= trainium2.MAX_STATIONARY,
        f"nc_matmul: stationary {stationary.shape} has more than 128 columns.",
    )
    require(
        math.prod(moving.shape[1:]) <= trainium2.MAX_MOVING,
        f"nc_matmul: moving {moving.shape} has more than 512 columns.",
    )


def _check_result(dst: Tensor, num_stationary: int, num_moving: int) -> None:
    require(
        dst.buffer == PSUM and dst.dtype == dtypes.float32,
        f"nc_matmul writes float32 to PSUM, found {dst.dtype} in {dst.buffer}.",
    )
    require(
        dst.shape[0] == num_stationary and math.prod(dst.shape[1:]) == num_moving,
        f"nc_matmul: {num_stationary} x {num_moving} results for {dst.shape}.",
    )
    _check_bank(dst)


def _check_bank(dst: Tensor) -> None:
    base = dst.storage.data
    start = dst.data.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    start %= base.strides[0]
    extent = sum(
        (size - 1) * stride
        for size, stride in zip(dst.shape[1:], dst.data.strides[1:], strict=True)
    )
    bank = trainium2.PSUM_BANK_BYTES
    require(
        start // bank == (start + extent + dst.dtype.itemsize - 1) // bank,
        f"A result of the tensor engine crosses a PSUM bank: {dst.shape}.",
    )


def _count(columns: int, rows: int) -> None:
    core = cores.current()
    cycles = max(columns, trainium2.MIN_CYCLES)
    core.counts.add("tensor", cycles * rows / _ARRAY)
    core.counts.serial_tensor_cycles += cycles
