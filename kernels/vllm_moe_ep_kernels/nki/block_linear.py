"""Products of activation rows with a prepared weight; see the reference of the same name."""

from typing import Any

from vllm_moe_ep_kernels.nki.cast import load_rows, row_tiles
from vllm_moe_ep_kernels.nki.product import add_product
from vllm_moe_ep_kernels.nki.weights import load_panel, load_scales, panel_blocks
from vllm_moe_ep_kernels.nki_api import nisa, nl

_P = 128
MAX_ROWS = 512  # moving columns of a matmul


def block_linear(
    x: Any, codes: Any, scales: Any, expert: int, is_fp4: bool, is_interleaved: bool
) -> Any:
    """cast(x) @ weight.T; each core computes its half of n.

    Args:
        x: HBM [rows, k], any float dtype, rows <= 512.
        codes, scales: HBM, as ``PreparedWeight``.
        expert: which matrix.
        is_fp4, is_interleaved: as ``PreparedWeight``.

    Returns:
        HBM fp32 [rows, n].
    """
    rows = load_rows(x)
    total = _zeros(codes, rows, is_fp4)
    _add_panels(total, rows, codes, scales, expert, is_fp4)
    return _store(total, codes, rows, is_fp4, is_interleaved)


def gated_block_linear(
    x: Any, codes: Any, scales: Any, flag: Any, expert: int, is_fp4: bool, is_interleaved: bool
) -> Any:
    """``block_linear`` where the flag is not 0; zeros, with no weight byte read, where it is.

    Args:
        flag: HBM int32 [1, 1].
    """
    rows = load_rows(x)
    total = _zeros(codes, rows, is_fp4)

    def body(_: Any) -> None:
        _add_panels(total, rows, codes, scales, expert, is_fp4)

    nl.fori_loop(0, register_of(load_flags(flag)), body)
    return _store(total, codes, rows, is_fp4, is_interleaved)


def load_flags(flags: Any) -> Any:
    """HBM int32 [1, count] -> SBUF int32 [1, count] of 0 and 1: trip counts of a gate."""
    tile = nl.ndarray(flags.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=flags)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.not_equal, operand0=0.0)
    return tile


def register_of(number: Any) -> Any:
    """A register that holds the number of a 1-element SBUF tile."""
    register = nisa.register_alloc()
    nisa.register_load(register, number)
    return register


def blocks_of_n(codes: Any, k_blocks: int, is_fp4: bool) -> tuple[int, int]:
    """Blocks of n in the weight, and in a panel; k_blocks are those of one part of k."""
    _, _, num_panels, _, width = codes.shape
    per_panel = width // (k_blocks * _P) * (2 if is_fp4 else 1)
    return num_panels * per_panel, per_panel


def add_matrix(
    total: Any,
    rows: Any,
    codes: Any,
    scales: Any,
    expert: Any,
    k_part: int,
    panels: range,
    is_fp4: bool,
) -> None:
    """total[:, block] += the product with each block of the panels, over one part of k.

    Args:
        total: SBUF fp32 [128, blocks of these panels, rows].
        rows: SBUF bf16 [128, k blocks of this part, rows].
    """
    k_blocks = rows.shape[1]
    num_blocks, per_panel = blocks_of_n(codes, k_blocks, is_fp4)
    units = scales.shape[-1] // num_blocks
    count = len(panels) * per_panel
    scale = load_scales(scales, expert, k_part, panels[0] * per_panel, count, units)
    for place, panel in enumerate(panels):
        tile = load_panel(codes, expert, k_part, panel)
        for offset, weight in enumerate(panel_blocks(tile, per_panel, k_blocks, is_fp4)):
            block = place * per_panel + offset
            add_product(
                total[:, block, :], weight, rows, scale[:, block * units : (block + 1) * units]
            )


def _add_panels(total: Any, rows: Any, codes: Any, scales: Any, expert: int, is_fp4: bool) -> None:
    """This core's panels, over all parts of k."""
    _, k_parts, num_panels, _, _ = codes.shape
    share = num_panels // nl.num_programs(axes=0)
    first = nl.program_id(axis=0) * share
    k_blocks = rows.shape[1] // k_parts
    for part in range(k_parts):
        part_rows = rows[:, part * k_blocks : (part + 1) * k_blocks, :]
        panels = range(first, first + share)
        add_matrix(total, part_rows, codes, scales, expert, part, panels, is_fp4)


def _zeros(codes: Any, rows: Any, is_fp4: bool) -> Any:
    """SBUF fp32 [128, this core's blocks of n, rows]."""
    _, k_blocks, num_rows = rows.shape
    num_blocks, _ = blocks_of_n(codes, k_blocks // codes.shape[1], is_fp4)
    share = num_blocks // nl.num_programs(axes=0)
    total = nl.ndarray((_P, share, num_rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0, engine=nisa.engine.gpsimd)
    return total


def _store(total: Any, codes: Any, rows: Any, is_fp4: bool, is_interleaved: bool) -> Any:
    """Turn [128 (n), blocks, rows] back and write this core's columns."""
    _, share, num_rows = total.shape
    num_blocks = share * nl.num_programs(axes=0)
    first = nl.program_id(axis=0) * share
    out = nl.ndarray((num_rows, num_blocks * _P), dtype=nl.float32, buffer=nl.shared_hbm)
    if is_interleaved:
        for block in range(share):
            half, index = (first + block) % 2, (first + block) // 2
            column = half * (num_blocks // 2) + index
            store_blocks(total[:, block : block + 1, :], out, column)
    else:
        store_blocks(total, out, first)
    return out


def store_blocks(total: Any, out: Any, first: int) -> None:
    """SBUF fp32 [128 (n), blocks, rows] -> columns of HBM [rows, n] from block ``first`` on."""
    _, num_blocks, num_rows = total.shape
    columns = out.reshape((num_rows, out.shape[1] // _P, _P))
    for block, blocks, row, rows in row_tiles(num_rows, num_blocks):
        turned = nl.ndarray((blocks * rows, _P), dtype=nl.float32, buffer=nl.psum)
        part = total[:, block : block + blocks, row : row + rows]
        nisa.nc_transpose(dst=turned, data=part, engine=nisa.engine.tensor)
        tile = nl.ndarray((blocks * rows, _P), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=tile, src=turned, engine=nisa.engine.scalar)
        place = columns[row : row + rows, first + block : first + block + blocks, :]
        nisa.dma_copy(dst=place.permute((1, 0, 2)), src=tile, dge_mode=nisa.dge_mode.hwdge)
