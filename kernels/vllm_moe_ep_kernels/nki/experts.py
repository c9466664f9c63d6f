"""Whole experts: gate_up, SwiGLU and down, with the activation kept on chip.

Each core owns one half of the intermediate dimension: its gate and up rows, and the down columns
that meet them. So no weight byte is read twice and nothing passes between the cores; each returns
a partial sum of the output, and the caller adds the two.
"""

from dataclasses import dataclass
from typing import Any

from vllm_moe_ep_kernels.nki.block_linear import (
    add_matrix,
    blocks_of_n,
    load_flags,
    register_of,
    store_blocks,
)
from vllm_moe_ep_kernels.nki.cast import cast_transposed, load_rows
from vllm_moe_ep_kernels.nki.swiglu import swiglu_tile
from vllm_moe_ep_kernels.nki.weights import part_of
from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128
MAX_ROWS = 128


def gated_experts(
    x: Any,
    w13_codes: Any,
    w13_scales: Any,
    w2_codes: Any,
    w2_scales: Any,
    row_weight: Any,
    flags: Any,
    is_fp4: bool,
    swiglu_limit: float,
) -> Any:
    """The sum over experts; one whose flag is 0 is not read.

    Args:
        x: HBM [rows, hidden_size], any float dtype, rows <= 128.
        w13_codes, w13_scales: HBM, ``PreparedWeight`` of gate and up, interleaved.
        w2_codes, w2_scales: HBM, of down, with as many parts of k as there are cores.
        row_weight: HBM fp32 [experts, rows]; 0 where a row is not routed.
        flags: HBM int32 [1, experts].
        is_fp4: as ``PreparedWeight``, of both.
        swiglu_limit: clamp of the activation, 0 for none.

    Returns:
        HBM fp32 [cores, rows, hidden_size], partial sums.
    """
    weights = (w13_codes, w13_scales, w2_codes, w2_scales)
    experts = _Experts(weights, row_weight, is_fp4, swiglu_limit)
    rows = load_rows(x)
    total = _zeros(rows)
    trips_of = load_flags(flags)
    for expert in range(flags.shape[1]):

        def body(_: Any, expert: int = expert) -> None:
            experts.add(total, rows, expert)

        nl.fori_loop(0, register_of(trips_of[0:1, expert : expert + 1]), body)
    return _store(total)


def listed_experts(
    x: Any,
    w13_codes: Any,
    w13_scales: Any,
    w2_codes: Any,
    w2_scales: Any,
    row_weight: Any,
    expert_ids: Any,
    count: Any,
    is_fp4: bool,
    swiglu_limit: float,
) -> Any:
    """``gated_experts`` over a list: one loop whose body is compiled once, for any number.

    Args:
        expert_ids: HBM int32 [1, experts], the experts to visit first.
        count: HBM int32 [1, 1], how many to visit.
    """
    weights = (w13_codes, w13_scales, w2_codes, w2_scales)
    experts = _Experts(weights, row_weight, is_fp4, swiglu_limit)
    rows = load_rows(x)
    total = _zeros(rows)
    visits = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=visits, src=count)

    def body(visit: Any) -> None:
        expert = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        source = expert_ids.ap(pattern=[[1, 1], [1, 1]], scalar_offset=visit, indirect_dim=1)
        nisa.dma_copy(dst=expert, src=source, dge_mode=nisa.dge_mode.hwdge)
        experts.add(total, rows, expert)

    nl.fori_loop(0, register_of(visits), body)
    return _store(total)


def grouped_experts(
    x: Any,
    w13_codes: Any,
    w13_scales: Any,
    w2_codes: Any,
    w2_scales: Any,
    row_weight: Any,
    flags: Any,
    is_fp4: bool,
    swiglu_limit: float,
) -> Any:
    """Each expert on rows of its own; one whose flag is 0 is not read, and gives zeros.

    Args:
        x: HBM [experts, rows, hidden_size], any float dtype, rows <= 128.
        All else as ``gated_experts`` has it.

    Returns:
        HBM fp32 [cores, experts, rows, hidden_size], partial sums.
    """
    weights = (w13_codes, w13_scales, w2_codes, w2_scales)
    experts = _Experts(weights, row_weight, is_fp4, swiglu_limit)
    shape = (nl.num_programs(axes=0), x.shape[0], x.shape[1], x.shape[2])
    out = nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)
    partial = out[nl.program_id(axis=0)]
    trips_of = load_flags(flags)
    idle_trips_of = nl.ndarray(flags.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=idle_trips_of,
        data=trips_of,
        op0=nl.multiply,
        operand0=-1.0,
        op1=nl.add,
        operand1=1.0,
    )
    zeros = nl.ndarray((_P, x.shape[1] * x.shape[2] // _P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
    for expert in range(x.shape[0]):

        def compute(_: Any, expert: int = expert) -> None:
            rows = load_rows(x[expert])
            total = _zeros(rows)
            experts.add(total, rows, expert)
            store_blocks(total, partial[expert], 0)

        def clear(_: Any, expert: int = expert) -> None:
            place = partial[expert].reshape(zeros.shape)
            nisa.dma_copy(dst=place, src=zeros, dge_mode=nisa.dge_mode.hwdge)

        nl.fori_loop(0, register_of(trips_of[0:1, expert : expert + 1]), compute)
        nl.fori_loop(0, register_of(idle_trips_of[0:1, expert : expert + 1]), clear)
    return out


@dataclass(frozen=True)
class _Experts:
    """Prepared weights of all experts, and what each does to rows."""

    weights: tuple[Any, Any, Any, Any]
    row_weight: Any
    is_fp4: bool
    swiglu_limit: float

    def add(self, total: Any, rows: Any, expert: Any) -> None:
        """total += the expert's output, on this core's half of its width.

        Args:
            total, rows: SBUF [128, blocks of hidden_size, rows], fp32 and bf16.
            expert: as ``part_of`` takes it.
        """
        w13_codes, w13_scales, w2_codes, w2_scales = self.weights
        num_rows, core = rows.shape[2], nl.program_id(axis=0)
        num_blocks, per_panel = blocks_of_n(w13_codes, rows.shape[1], self.is_fp4)
        share = num_blocks // nl.num_programs(axes=0)
        gate_up = nl.ndarray((_P, share, num_rows), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=gate_up, value=0.0, engine=nisa.engine.gpsimd)
        num_panels = share // per_panel
        panels = range(core * num_panels, (core + 1) * num_panels)
        add_matrix(gate_up, rows, w13_codes, w13_scales, expert, 0, panels, self.is_fp4)
        spread = nl.ndarray((_P, num_rows), dtype=nl.float32, buffer=nl.sbuf)
        source = part_of(self.row_weight, expert, 0, [[0, _P], [1, num_rows]])
        nisa.dma_copy(dst=spread, src=source, dge_mode=nisa.dge_mode.hwdge)
        pairs = gate_up.reshape((_P, share // 2, 2, num_rows))
        activated = swiglu_tile(pairs[:, :, 0, :], pairs[:, :, 1, :], spread, self.swiglu_limit)
        panels = range(w2_codes.shape[2])
        kept = cast_transposed(activated)
        add_matrix(total, kept, w2_codes, w2_scales, expert, core, panels, self.is_fp4)


def _zeros(rows: Any) -> Any:
    """SBUF fp32 [128, blocks of hidden_size, rows]."""
    total = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
    return total


def _store(total: Any) -> Any:
    _, num_blocks, num_rows = total.shape
    shape = (nl.num_programs(axes=0), num_rows, num_blocks * _P)
    out = nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)
    store_blocks(total, out[nl.program_id(axis=0)], 0)
    return out
