"""Second projection of few rows per expert: the weight's rows are the product's rows.

Either each pair's product is stored, in parts where k is split over programs, for a sum in a
fixed order later. Or a program goes through all of one token's pairs and stores their weighted
sum, which reads an expert's weights once per token: for one token.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.product_tiles import GROUP, ProductTiles
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting
from vllm_moe_ep_kernels.triton_kernels.few_rows_loads import (
    cast_if,
    fetch_ahead,
    find_group,
    let_next_kernel_start,
    pairs_at,
    wait_for_kernel_before,
    weight_places,
    weight_tile,
)
from vllm_moe_ep_kernels.triton_kernels.few_rows_lookup import lookup_of, weight_operand
from vllm_moe_ep_kernels.triton_kernels.local_ids import load_local_ids


@triton.jit
def _down(
    row_ptr,
    row_scale_ptr,
    weight,
    weight_scale_ptr,
    weight_row,
    pairs,
    is_row,
    first_group,
    end_group,
    k,
    IS_FP8: tl.constexpr,
    IS_CAST: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """fp32 [COLUMNS, ROWS] over the groups of k from `first_group` up to `end_group`."""
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    row_places = row_ptr + pairs[:, None] * k + tl.arange(0, GROUP)[None, :]
    places = weight_places(weight, weight_row, k, HAS_DESCRIPTOR, COLUMNS, GROUP)
    if IS_FP8:
        # Scales come one step before their products, which wait for nothing else that is late.
        scales = weight_scale_ptr + (weight_row // GROUP).to(tl.int64) * (k // GROUP)
        row_scales = row_scale_ptr + pairs * (k // GROUP)
        # A part may be empty and start behind k.
        last_group = k // GROUP - 1
        first_scale = tl.minimum(first_group, last_group)
        next_scale = tl.load(scales + first_scale)
        next_row_scale = tl.zeros([ROWS], tl.float32)
        if not IS_CAST:
            next_row_scale = tl.load(row_scales + first_scale, mask=is_row, other=0.0)
    for group in range(first_group, end_group):
        column = group * GROUP
        rows = tl.load(row_places + column, mask=is_row[:, None], other=0.0)
        tile = weight_tile(weight, places, column, HAS_DESCRIPTOR)
        if IS_FP8:
            scale, row_scale = next_scale, next_row_scale
            following = tl.minimum(group + 1, last_group)
            next_scale = tl.load(scales + following)
            if not IS_CAST:
                next_row_scale = tl.load(row_scales + following, mask=is_row, other=0.0)
            rows, row_scale = cast_if(rows, row_scale, IS_CAST)
            total += tl.dot(tile, tl.trans(rows)) * (scale * row_scale)[None, :]
        else:
            total = tl.dot(tile, tl.trans(rows), total)
    return total


@triton.jit(do_not_specialize=["num_pairs", "num_ids", "groups_per_part"])
def _down_kernel(
    row_ptr,
    row_scale_ptr,
    weight,
    weight_scale_ptr,
    weight_ptr,
    out_ptr,
    ids_ptr,
    map_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    num_pairs,
    num_ids,
    k,
    n,
    groups_per_part,
    HAS_MAP: tl.constexpr,
    HAS_TILES: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_CAST: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
    PREFETCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    group = tl.program_id(0)
    block = tl.program_id(1)
    part = tl.program_id(2)
    # What tells a program its expert is older than the kernel before, which only started once
    # that was there: the expert's weights can be asked for before the wait.
    if HAS_TILES:
        expert = tl.load(tile_expert_ptr + group)
        pairs = tl.load(tile_pairs_ptr + group * ROWS + tl.arange(0, ROWS))
        size = tl.where(expert >= 0, ROWS, 0)
    else:
        expert, place, size = find_group(
            ids_ptr, map_ptr, group, num_pairs, num_ids, HAS_MAP, IS_BY_EXPERT, BLOCK_PAIRS
        )
    weight_row = expert * n + block * COLUMNS
    first_group = part * groups_per_part
    end_group = tl.minimum(first_group + groups_per_part, k // GROUP)
    if PREFETCH > 0:
        if size > 0:
            start = weight_ptr + first_group * GROUP
            fetch_ahead(start, weight_row, k, COLUMNS, PREFETCH)
    wait_for_kernel_before(IS_OVERLAPPED)
    let_next_kernel_start(IS_OVERLAPPED)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(0, size, ROWS):
        if not HAS_TILES:
            pairs = pairs_at(place, first, BLOCK_PAIRS, ROWS)
        is_row = pairs >= 0
        numbers = tl.where(is_row, pairs, 0).to(tl.int64)
        total = _down(
            row_ptr,
            row_scale_ptr,
            weight,
            weight_scale_ptr,
            weight_row,
            numbers,
            is_row,
            first_group,
            end_group,
            k,
            IS_FP8,
            IS_CAST,
            HAS_DESCRIPTOR,
            ROWS,
            COLUMNS,
            GROUP,
        )
        out_rows = part.to(tl.int64) * num_pairs + numbers
        places = out_ptr + out_rows[None, :] * n + columns[:, None]
        tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_ids", "topk_weight_stride"])
def _down_combined_kernel(
    row_ptr,
    row_scale_ptr,
    weight,
    weight_scale_ptr,
    topk_weight_ptr,
    out_ptr,
    ids_ptr,
    map_ptr,
    num_pairs,
    num_ids,
    topk_weight_stride,
    out_stride,
    k,
    n,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    IS_CAST: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    block = tl.program_id(0)
    token = tl.program_id(1)
    wait_for_kernel_before(IS_OVERLAPPED)
    let_next_kernel_start(IS_OVERLAPPED)
    slots = tl.arange(0, BLOCK_SLOTS)
    is_slot = slots < TOP_K
    pairs = tl.where(is_slot, token * TOP_K + slots, num_pairs)
    local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
    is_local = local >= 0
    place = tl.where(is_local, tl.cumsum(is_local.to(tl.int32), axis=0) - 1, -1)
    weights = tl.load(
        topk_weight_ptr + token.to(tl.int64) * topk_weight_stride + slots, mask=is_local, other=0.0
    ).to(tl.float32)
    num_local = tl.sum(is_local.to(tl.int32), axis=0)
    num_groups = k // GROUP
    is_row = tl.arange(0, ROWS) == 0
    row_offsets = tl.arange(0, ROWS)[:, None] * k + tl.arange(0, GROUP)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    # One loop over all pairs' groups: loads run on from one pair into the next.
    for step in range(0, num_local * num_groups):
        is_now = place == step // num_groups
        group = step % num_groups
        pair = token * TOP_K + tl.sum(tl.where(is_now, slots, 0), axis=0)
        expert = tl.sum(tl.where(is_now, local, 0), axis=0)
        factor = tl.sum(tl.where(is_now, weights, 0.0), axis=0)
        row_start = row_ptr + pair.to(tl.int64) * k + group * GROUP
        rows = tl.load(row_start + row_offsets, mask=is_row[:, None], other=0.0)
        weight_row = expert * n + block * COLUMNS
        places = weight_places(weight, weight_row, k, HAS_DESCRIPTOR, COLUMNS, GROUP)
        tile = weight_tile(weight, places, group * GROUP, HAS_DESCRIPTOR)
        if IS_FP8:
            scales = weight_scale_ptr + (weight_row // GROUP).to(tl.int64) * num_groups
            factor *= tl.load(scales + group)
            row_scale = tl.full([ROWS], 1.0, tl.float32)
            if not IS_CAST:
                row_scale *= tl.load(row_scale_ptr + pair.to(tl.int64) * num_groups + group)
            rows, row_scale = cast_if(rows, row_scale, IS_CAST)
            total += tl.dot(tile, tl.trans(rows)) * (factor * row_scale)[None, :]
        else:
            total += tl.dot(tile, tl.trans(rows)) * factor
    # Other columns than the first hold zeros, or NaN if the weights or the factor are so; the
    # first one alone is selected.
    result = tl.sum(tl.where(is_row[None, :], total, 0.0), axis=1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    places = out_ptr + token.to(tl.int64) * out_stride + columns
    tl.store(places, result.to(out_ptr.dtype.element_ty))


def few_rows_down(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    out: Tensor,
    tiles: ProductTiles = ProductTiles(),  # noqa: B008
) -> None:
    """As the reference of this name, in one launch.

    Raises:
        ValueError: the routing has tiles of another height.
    """
    num_parts, num_pairs, n = out.shape
    if num_pairs == 0:
        return
    k = rows.shape[1]
    lookup = lookup_of(routing, tiles)
    is_fp8 = weight_scale is not None
    _down_kernel[(lookup.num_groups, n // tiles.block_columns, num_parts)](
        row_ptr=rows,
        row_scale_ptr=rows if row_scale is None else row_scale,
        weight=weight_operand(weight, tiles),
        weight_scale_ptr=weight if weight_scale is None else weight_scale,
        weight_ptr=weight,
        out_ptr=out,
        **lookup.tensors,
        **lookup.numbers,
        k=k,
        n=n,
        groups_per_part=triton.cdiv(k // GROUP, num_parts),
        **lookup.constants,
        IS_FP8=is_fp8,
        IS_CAST=is_fp8 and row_scale is None,
        HAS_DESCRIPTOR=tiles.has_descriptors,
        IS_OVERLAPPED=tiles.is_overlapped,
        PREFETCH=_bytes_ahead(tiles, weight, num_parts),
        ROWS=tiles.block_rows,
        COLUMNS=tiles.block_columns,
        GROUP=GROUP,
        **tiles.launch_options,
    )


def _bytes_ahead(tiles: ProductTiles, weight: Tensor, num_parts: int) -> int:
    """What may be fetched of a weight row: nothing behind the end of the last part."""
    if not tiles.is_overlapped:
        return 0
    k = weight.shape[2]
    part_size = triton.cdiv(k // GROUP, num_parts) * GROUP
    last_part = max(k - (num_parts - 1) * part_size, 0)
    return min(tiles.prefetch_bytes, last_part * weight.element_size())


def few_rows_down_combined(
    rows: Tensor,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    routing: PairRouting,
    topk_weights: Tensor,
    out: Tensor,
    tiles: ProductTiles = ProductTiles(),  # noqa: B008
) -> None:
    """As the reference of this name, in one launch."""
    num_tokens, n = out.shape
    if num_tokens == 0:
        return
    top_k = routing.topk_ids.shape[1]
    ids = routing.topk_ids.contiguous()
    is_fp8 = weight_scale is not None
    _down_combined_kernel[(n // tiles.block_columns, num_tokens)](
        row_ptr=rows,
        row_scale_ptr=rows if row_scale is None else row_scale,
        weight=weight_operand(weight, tiles),
        weight_scale_ptr=weight if weight_scale is None else weight_scale,
        topk_weight_ptr=topk_weights,
        out_ptr=out,
        ids_ptr=ids,
        map_ptr=ids if routing.expert_map is None else routing.expert_map,
        num_pairs=routing.num_pairs,
        num_ids=routing.num_ids,
        topk_weight_stride=topk_weights.stride(0),
        out_stride=out.stride(0),
        k=rows.shape[1],
        n=n,
        TOP_K=top_k,
        BLOCK_SLOTS=triton.next_power_of_2(top_k),
        HAS_MAP=routing.expert_map is not None,
        IS_FP8=is_fp8,
        IS_CAST=is_fp8 and row_scale is None,
        HAS_DESCRIPTOR=tiles.has_descriptors,
        IS_OVERLAPPED=tiles.is_overlapped,
        ROWS=tiles.block_rows,
        COLUMNS=tiles.block_columns,
        GROUP=GROUP,
        **tiles.launch_options,
    )
