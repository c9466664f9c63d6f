"""SwiGLU; see the reference of the same name."""

from typing import Any

from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128


def swiglu_tile(gate: Any, up: Any, row_weight: Any, swiglu_limit: float) -> Any:
    """row_weight * silu(min(gate, L)) * clamp(up, -L, L), exactly 0 where the weight is 0.

    Args:
        gate, up: SBUF fp32 [parts, columns, rows]; changed.
        row_weight: SBUF fp32 [parts, rows].
        swiglu_limit: L, or 0 for no clamp.

    Returns:
        SBUF fp32 [parts, columns, rows].
    """
    parts, columns, rows = gate.shape
    if swiglu_limit > 0:
        nisa.tensor_scalar(dst=gate, data=gate, op0=nl.minimum, operand0=swiglu_limit)
        nisa.tensor_scalar(
            dst=up,
            data=up,
            op0=nl.minimum,
            operand0=swiglu_limit,
            op1=nl.maximum,
            operand1=-swiglu_limit,
        )
    nisa.activation(dst=gate, op=nl.silu, data=gate)
    nisa.tensor_tensor(dst=gate, data1=gate, data2=up, op=nl.multiply)
    weights = row_weight.expand_dim(1).broadcast(1, columns)
    nisa.tensor_tensor(dst=gate, data1=gate, data2=weights, op=nl.multiply)
    is_routed = nl.ndarray((parts, rows), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_routed, data=row_weight, op0=nl.not_equal, operand0=0.0)
    # A selection: NaN of a row that is not routed here would survive a product with 0.
    chosen = nl.ndarray((parts, columns, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=chosen, value=0.0, engine=nisa.engine.gpsimd)
    predicate = is_routed.expand_dim(1).broadcast(1, columns)
    nisa.tensor_copy_predicated(dst=chosen, src=gate, predicate=predicate)
    return chosen


def swiglu(gate_up: Any, row_weight: Any, swiglu_limit: float) -> Any:
    """HBM fp32 [rows, 2 * width], [rows, 1] -> HBM fp32 [rows, width]; cores share the columns."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    share = width // nl.num_programs(axes=0)
    start = nl.program_id(axis=0) * share
    out = nl.ndarray((num_rows, width), dtype=nl.float32, buffer=nl.shared_hbm)
    for row in range(0, num_rows, _P):
        stop = min(num_rows, row + _P)
        shape = (stop - row, share, 1)
        halves = []
        for first in (start, width + start):
            half = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=half, src=gate_up[row:stop, first : first + share])
            halves.append(half)
        weight = nl.ndarray((stop - row, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight, src=row_weight[row:stop, :])
        activated = swiglu_tile(halves[0], halves[1], weight, swiglu_limit)
        nisa.dma_copy(dst=out[row:stop, start : start + share], src=activated)
    return out
