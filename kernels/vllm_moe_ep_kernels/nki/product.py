"""Products of cast rows with one block of weight rows, scaled as they leave PSUM."""

from typing import Any

from vllm_moe_ep_kernels.nki.api import nisa, nl

_P = 128
# Up to here scaling several partial sums at once beats one instruction for each.
MAX_GROUPED_ROWS = 30
# Numbers per partition that one instruction scales: long enough to be worth its fixed cost, and
# short, since what the last step adds up is as long.
SCALED_AT_ONCE = 128


def add_product(total: Any, weight: Any, rows: Any, scale: Any) -> None:
    """total += weight.T @ rows, with each partial sum over a unit of k times its scale.

    Args:
        total: SBUF fp32 [128 (n), rows], written already.
        weight: SBUF fp8 [128 (k), k_blocks, 128 (n)].
        rows: SBUF bf16 [128 (k), k_blocks, rows].
        scale: SBUF fp32 [128 (n), units], one unit per k block or four.
    """
    num_rows, units = rows.shape[2], scale.shape[1]
    per_block = units // rows.shape[1]
    if num_rows > MAX_GROUPED_ROWS:
        _add_one_by_one(total, weight, rows, scale)
        return
    step = min(units, SCALED_AT_ONCE // num_rows)
    gathered = nl.ndarray((_P, step, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, units, step):
        count = min(step, units - start)
        sums = nl.ndarray((_P, count, num_rows), dtype=nl.float32, buffer=nl.psum)
        for unit in range(count):
            _multiply(sums[:, unit, :], weight, rows, start + unit, per_block)
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


def _add_one_by_one(total: Any, weight: Any, rows: Any, scale: Any) -> None:
    """Every other partial sum on the vector engine; the rest on the scalar engine and GpSimd."""
    num_rows, units = rows.shape[2], scale.shape[1]
    per_block = units // rows.shape[1]
    others = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=others, value=0.0, engine=nisa.engine.gpsimd)
    for unit in range(units):
        sums = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.psum)
        _multiply(sums, weight, rows, unit, per_block)
        factor = scale[:, unit : unit + 1]
        if unit % 2 == 1:
            scaled = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=scaled, op=nl.copy, data=sums, scale=factor)
            _add(others, scaled)
            continue
        nisa.scalar_tensor_tensor(
            dst=total, data=sums, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=total
        )
    _add(total, others)


def _add(total: Any, part: Any) -> None:
    nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add, engine=nisa.engine.gpsimd)


def _multiply(sums: Any, weight: Any, rows: Any, unit: int, per_block: int) -> None:
    block = unit // per_block
    if per_block == 1:
        nisa.nc_matmul(
            dst=sums, stationary=weight[:, block, :], moving=rows[:, block, :], accumulate=False
        )
        return
    # A scale per 32 columns: a quarter of the array each, side by side.
    height = _P // per_block
    first = unit % per_block * height
    nisa.nc_matmul(
        dst=sums,
        stationary=weight[first : first + height, block, :],
        moving=rows[first : first + height, block, :],
        accumulate=False,
        tile_position=(first, 0),
        tile_size=(height, _P),
    )
