"""First projection and SwiGLU of few rows per expert.

The weight's rows are the product's rows: a tile of weights meets as few columns as an expert has
pairs. A program computes the same columns of gate and up, so that SwiGLU needs no other launch,
and reads its tokens' rows where they lie.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.product_tiles import GROUP, ProductTiles
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting
from vllm_moe_ep_kernels.triton_kernels.few_rows_loads import (
    cast_if,
    find_group,
    let_next_kernel_start,
    pairs_at,
    wait_for_kernel_before,
    weight_places,
    weight_tile,
)
from vllm_moe_ep_kernels.triton_kernels.few_rows_lookup import lookup_of, weight_operand
from vllm_moe_ep_kernels.triton_kernels.fp8_cast import cast_groups
from vllm_moe_ep_kernels.triton_kernels.swiglu_rows import swiglu


@triton.jit
def _gate_up(
    row_ptr,
    row_scale_ptr,
    weight,
    weight_scale_ptr,
    expert,
    block,
    tokens,
    is_row,
    row_stride,
    k,
    n,
    IS_FP8: tl.constexpr,
    IS_CAST: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """fp32 [COLUMNS, ROWS] of gate and of up."""
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    row_places = row_ptr + tokens[:, None] * row_stride + tl.arange(0, GROUP)[None, :]
    gate_row = expert * 2 * n + block * COLUMNS
    gate_places = weight_places(weight, gate_row, k, HAS_DESCRIPTOR, COLUMNS, GROUP)
    up_places = weight_places(weight, gate_row + n, k, HAS_DESCRIPTOR, COLUMNS, GROUP)
    num_groups = k // GROUP
    if IS_FP8:
        # Scales come one step before their products, which wait for nothing else that is late.
        gate_scales = weight_scale_ptr + (gate_row // GROUP).to(tl.int64) * num_groups
        up_scales = gate_scales + (n // GROUP).to(tl.int64) * num_groups
        row_scales = row_scale_ptr + tokens * num_groups
        next_gate_scale = tl.load(gate_scales)
        next_up_scale = tl.load(up_scales)
        next_row_scale = tl.zeros([ROWS], tl.float32)
        if not IS_CAST:
            next_row_scale = tl.load(row_scales, mask=is_row, other=0.0)
    for group in range(0, num_groups):
        column = group * GROUP
        rows = tl.load(row_places + column, mask=is_row[:, None], other=0.0)
        gate_tile = weight_tile(weight, gate_places, column, HAS_DESCRIPTOR)
        up_tile = weight_tile(weight, up_places, column, HAS_DESCRIPTOR)
        if IS_FP8:
            gate_scale, up_scale, row_scale = next_gate_scale, next_up_scale, next_row_scale
            following = tl.minimum(group + 1, num_groups - 1)
            next_gate_scale = tl.load(gate_scales + following)
            next_up_scale = tl.load(up_scales + following)
            if not IS_CAST:
                next_row_scale = tl.load(row_scales + following, mask=is_row, other=0.0)
            rows, row_scale = cast_if(rows, row_scale, IS_CAST)
            columns = tl.trans(rows)
            gate += tl.dot(gate_tile, columns) * (gate_scale * row_scale)[None, :]
            up += tl.dot(up_tile, columns) * (up_scale * row_scale)[None, :]
        else:
            columns = tl.trans(rows)
            gate = tl.dot(gate_tile, columns, gate)
            up = tl.dot(up_tile, columns, up)
    return gate, up


@triton.jit
def _store(
    activated,
    out_ptr,
    out_scale_ptr,
    block,
    pairs,
    n,
    IS_FP8_OUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each pair's columns, as they are or cast to fp8 with one scale for all of them."""
    is_pair = pairs >= 0
    rows = tl.where(is_pair, pairs, 0).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    if IS_FP8_OUT:
        stored, scale = cast_groups(tl.trans(activated))
        tl.store(out_ptr + rows[:, None] * n + columns[None, :], stored, mask=is_pair[:, None])
        tl.store(out_scale_ptr + rows * (n // COLUMNS) + block, scale, mask=is_pair)
    else:
        places = out_ptr + rows[None, :] * n + columns[:, None]
        tl.store(places, activated.to(out_ptr.dtype.element_ty), mask=is_pair[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_ids"])
def _gate_up_kernel(
    row_ptr,
    row_scale_ptr,
    weight,
    weight_scale_ptr,
    out_ptr,
    out_scale_ptr,
    ids_ptr,
    map_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_ids,
    row_stride,
    k,
    n,
    limit,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_TILES: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_CAST: tl.constexpr,
    IS_FP8_OUT: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    group = tl.program_id(0)
    block = tl.program_id(1)
    wait_for_kernel_before(IS_OVERLAPPED)
    let_next_kernel_start(IS_OVERLAPPED)
    if HAS_TILES:
        expert = tl.load(tile_expert_ptr + group)
        pairs = tl.load(tile_pairs_ptr + group * ROWS + tl.arange(0, ROWS))
        size = tl.where(expert >= 0, ROWS, 0)
    else:
        expert, place, size = find_group(
            ids_ptr, map_ptr, group, num_pairs, num_ids, HAS_MAP, IS_BY_EXPERT, BLOCK_PAIRS
        )
    # One turn with tiles. Without, more than one only where an expert has more pairs than ROWS.
    for first in range(0, size, ROWS):
        if not HAS_TILES:
            pairs = pairs_at(place, first, BLOCK_PAIRS, ROWS)
        is_row = pairs >= 0
        tokens = tl.where(is_row, pairs // TOP_K, 0).to(tl.int64)
        gate, up = _gate_up(
            row_ptr,
            row_scale_ptr,
            weight,
            weight_scale_ptr,
            expert,
            block,
            tokens,
            is_row,
            row_stride,
            k,
            n,
            IS_FP8,
            IS_CAST,
            HAS_DESCRIPTOR,
            ROWS,
            COLUMNS,
            GROUP,
        )
        activated = swiglu(gate, up, limit, HAS_LIMIT)
        _store(activated, out_ptr, out_scale_ptr, block, pairs, n, IS_FP8_OUT, COLUMNS)


def few_rows_gate_up(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    swiglu_limit: float | None,
    out: Tensor,
    out_scale: Tensor | None,
    tiles: ProductTiles = ProductTiles(),  # noqa: B008
) -> None:
    """As the reference of this name, in one launch; `rows` may be strided, nothing else.

    Args:
        tiles: with an fp8 `out`, block_columns is 128: a program casts whole groups.

    Raises:
        ValueError: an fp8 `out` with other block_columns, or tiles of another height.
    """
    if out_scale is not None and tiles.block_columns != GROUP:
        raise ValueError(
            f"An fp8 result needs programs of {GROUP} columns, found {tiles.block_columns}."
        )
    num_pairs, n = out.shape
    if num_pairs == 0:
        return
    lookup = lookup_of(routing, tiles)
    is_fp8 = weight_scale is not None
    _gate_up_kernel[(lookup.num_groups, n // tiles.block_columns)](
        row_ptr=rows,
        row_scale_ptr=rows if row_scale is None else row_scale,
        weight=weight_operand(weight, tiles),
        weight_scale_ptr=weight if weight_scale is None else weight_scale,
        out_ptr=out,
        out_scale_ptr=out if out_scale is None else out_scale,
        **lookup.tensors,
        **lookup.numbers,
        row_stride=rows.stride(0),
        k=rows.shape[1],
        n=n,
        limit=0.0 if swiglu_limit is None else swiglu_limit,
        TOP_K=routing.topk_ids.shape[1],
        **lookup.constants,
        HAS_LIMIT=swiglu_limit is not None,
        IS_FP8=is_fp8,
        IS_CAST=is_fp8 and row_scale is None,
        IS_FP8_OUT=out_scale is not None,
        HAS_DESCRIPTOR=tiles.has_descriptors,
        IS_OVERLAPPED=tiles.is_overlapped,
        ROWS=tiles.block_rows,
        COLUMNS=tiles.block_columns,
        GROUP=GROUP,
        **tiles.launch_options,
    )
