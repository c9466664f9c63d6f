"""Products of cast rows with one block of weight rows, scaled as they leave PSUM."""

from typing import Any

from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128
# Up to here scaling several partial sums at once beats one instruction for each.
MAX_GROUPED_ROWS = 30
# Numbers per partition that one instruction scales: long enough to be worth its fixed cost, and
# short, since what the last step adds up is as long.
SCALED_AT_ONCE = 128
# Of so many partial sums scaled one by one, the vector engine takes the first number and the scalar
# engine, with GpSimd to add, the rest: as the engines' clocks and their other work suggest.
_SHARED_UNITS = 5
_VECTOR_UNITS = 2


def add_product(total: Any, weight: Any, rows: Any, scale: Any) -> None:
    """total += weight.T @ rows, with each partial sum over a unit of k times its scale.

    Args:
        total: SBUF fp32 [128 (n), rows], written already.
        weight: SBUF fp8 [128 (k), k_blocks, 128 (n)].
        rows: SBUF bf16 [128 (k), k_blocks, rows].
        scale: SBUF fp32 [128 (n), units]: four units per k block, or one for one or more blocks.
    """
    num_rows, units = rows.shape[2], scale.shape[1]
    if is_one_by_one(num_rows, units):
        _add_one_by_one(total, weight, rows, scale)
        return
    step = min(units, SCALED_AT_ONCE // num_rows)
    gathered = nl.ndarray((_P, step, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, units, step):
        count = min(step, units - start)
        sums = nl.ndarray((_P, count, num_rows), dtype=nl.float32, buffer=nl.psum)
        for unit in range(count):
            _multiply(sums[:, unit, :], weight, rows, start + unit, units)
        factors = scale[:, start : start + count].expand_dim(2).broadcast(2, num_rows)
        if start == 0:
            nisa.tensor_tensor(dst=gathered, data1=sums, data2=factors, op=nl.multiply)
            continue
        scaled = nl.ndarray((_P, count, num_rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=scaled, data1=sums, data2=factors, op=nl.multiply)
        # On GpSimd, which is idle otherwise, while the vector engine scales on.
        _add(gathered[:, 0:count, :], scaled)
    added = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=added, op=nl.add, data=gathered.permute((0, 2, 1)), axis=2)
    _add(total, added)


def is_one_by_one(num_rows: int, units: int) -> bool:
    """Whether each partial sum is scaled by an instruction of its own."""
    return num_rows > MAX_GROUPED_ROWS or units == 1


def is_on_vector(unit: int) -> bool:
    """Whether the vector engine scales this one of the partial sums scaled one by one."""
    return unit * _VECTOR_UNITS % _SHARED_UNITS < _VECTOR_UNITS


def _add_one_by_one(total: Any, weight: Any, rows: Any, scale: Any) -> None:
    """Some partial sums on the vector engine; the rest on the scalar engine and GpSimd."""
    num_rows, units = rows.shape[2], scale.shape[1]
    others: list[Any] = []
    for unit in range(units):
        sums = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.psum)
        _multiply(sums, weight, rows, unit, units)
        factor = scale[:, unit : unit + 1]
        if is_on_vector(unit):
            nisa.scalar_tensor_tensor(
                dst=total, data=sums, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=total
            )
            continue
        scaled = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=scaled, op=nl.copy, data=sums, scale=factor)
        if len(others) == 0:
            others.append(scaled)
        else:
            _add(others[0], scaled)
    for rest in others:
        _add(total, rest)


def _add(total: Any, part: Any) -> None:
    nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add, engine=nisa.engine.gpsimd)


def _multiply(sums: Any, weight: Any, rows: Any, unit: int, units: int) -> None:
    """sums = the product over one unit of k."""
    k_blocks = rows.shape[1]
    if units <= k_blocks:
        span = k_blocks // units
        for block in range(unit * span, (unit + 1) * span):
            nisa.nc_matmul(
                dst=sums,
                stationary=weight[:, block, :],
                moving=rows[:, block, :],
                accumulate=block > unit * span,
            )
        return
    # A scale per 32 columns: a quarter of the array each, side by side.
    per_block = units // k_blocks
    block, height = unit // per_block, _P // per_block
    first = unit % per_block * height
    nisa.nc_matmul(
        dst=sums,
        stationary=weight[first : first + height, block, :],
        moving=rows[first : first + height, block, :],
        accumulate=False,
        tile_position=(first, 0),
        tile_size=(height, _P),
    )
