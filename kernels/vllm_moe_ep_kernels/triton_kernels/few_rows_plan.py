"""Tiles of pairs and the cast of the tokens' rows, in one launch and without an atomic operation.

One program per expert counts the pairs of all experts, which tells where its own tiles start.
The other programs cast.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.product_tiles import GROUP
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting, RowTiles, max_row_tiles
from vllm_moe_ep_kernels.triton_kernels.few_rows_loads import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from vllm_moe_ep_kernels.triton_kernels.fp8_cast import cast_groups
from vllm_moe_ep_kernels.triton_kernels.local_ids import load_local_ids

_BLOCK_PAIRS = 4096
_COLUMNS = 1024
_TILES_PER_PASS = 256


@triton.jit
def _plan(
    ids_ptr,
    map_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    expert,
    num_pairs,
    num_ids,
    num_experts,
    num_tiles,
    HAS_MAP: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write one expert's tiles; the first expert marks the empty ones too."""
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
        # Pairs without a local expert fall into the bin behind the experts'.
        counts += tl.histogram(tl.where(local >= 0, local, num_experts), BINS)
    counts = tl.where(bins < num_experts, counts, 0)
    sizes = (counts + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(bins < expert, sizes, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    earlier = 0
    for first in range(0, num_pairs, BLOCK):
        pairs = first + tl.arange(0, BLOCK)
        local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
        is_hit = local == expert
        place = earlier + tl.cumsum(is_hit.to(tl.int32), axis=0) - 1
        tl.store(tile_pairs_ptr + first_tile * ROWS + place, pairs, mask=is_hit)
        earlier += tl.sum(is_hit.to(tl.int32), axis=0)
    size = (count + ROWS - 1) // ROWS
    rest = count + tl.arange(0, ROWS)
    tl.store(tile_pairs_ptr + first_tile * ROWS + rest, -1, mask=rest < size * ROWS)
    for first in range(0, size, TILES):
        tiles = first + tl.arange(0, TILES)
        tl.store(tile_expert_ptr + first_tile + tiles, expert, mask=tiles < size)
    if expert == 0:
        for first in range(tl.sum(sizes, axis=0), num_tiles, TILES):
            tiles = first + tl.arange(0, TILES)
            tl.store(tile_expert_ptr + tiles, -1, mask=tiles < num_tiles)


@triton.jit
def _cast(
    in_ptr, out_ptr, scale_ptr, token, part, stride, num_groups, GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    groups = part * GROUPS + tl.arange(0, GROUPS)
    is_group = groups < num_groups
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(in_ptr + token * stride + columns, mask=is_group[:, None], other=0.0)
    stored, scale = cast_groups(values.to(tl.float32))
    out_start = out_ptr + token * num_groups * SIZE
    tl.store(out_start + columns, stored, mask=is_group[:, None])
    tl.store(scale_ptr + token * num_groups + groups, scale, mask=is_group)


@triton.jit(
    do_not_specialize=[
        "num_pairs",
        "num_ids",
        "num_experts",
        "num_tiles",
        "parts_per_token",
        "num_groups",
    ]
)
def _plan_kernel(
    ids_ptr,
    map_ptr,
    tile_expert_ptr,
    tile_pairs_ptr,
    in_ptr,
    out_ptr,
    scale_ptr,
    num_pairs,
    num_ids,
    num_experts,
    num_tiles,
    parts_per_token,
    stride,
    num_groups,
    HAS_MAP: tl.constexpr,
    IS_CAST: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    program = tl.program_id(0)
    wait_for_kernel_before(IS_OVERLAPPED)
    let_next_kernel_start(IS_OVERLAPPED)
    if program < num_experts:
        _plan(
            ids_ptr, map_ptr, tile_expert_ptr, tile_pairs_ptr, program, num_pairs, num_ids,
            num_experts, num_tiles, HAS_MAP, BINS, BLOCK, ROWS, TILES,
        )  # fmt: skip
    elif IS_CAST:
        rest = program - num_experts
        token = (rest // parts_per_token).to(tl.int64)
        part = rest % parts_per_token
        _cast(in_ptr, out_ptr, scale_ptr, token, part, stride, num_groups, GROUPS, SIZE)


def few_rows_plan(
    routing: PairRouting,
    block_rows: int,
    hidden_states: Tensor | None,
    is_overlapped: bool = False,
) -> tuple[RowTiles, tuple[Tensor, Tensor] | None]:
    """As the reference of this name; no value travels to the host.

    Args:
        is_overlapped: as of `ProductTiles`.
    """
    ids = routing.topk_ids.contiguous()
    num_pairs, num_experts = routing.num_pairs, routing.num_local_experts
    num_tiles = max_row_tiles(num_pairs, num_experts, block_rows)
    expert_of_tile = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    pairs = torch.empty((num_tiles, block_rows), dtype=torch.int32, device=ids.device)
    cast = None if hidden_states is None else _cast_buffers(hidden_states)
    if num_pairs == 0:
        return RowTiles(expert_of_tile, pairs), cast
    num_groups = 0 if hidden_states is None else hidden_states.shape[1] // GROUP
    parts_per_token = triton.cdiv(num_groups * GROUP, _COLUMNS)
    options = {"launch_pdl": True} if is_overlapped else {}
    _plan_kernel[(num_experts + parts_per_token * routing.topk_ids.shape[0],)](
        ids_ptr=ids,
        map_ptr=ids if routing.expert_map is None else routing.expert_map,
        tile_expert_ptr=expert_of_tile,
        tile_pairs_ptr=pairs,
        in_ptr=ids if hidden_states is None else hidden_states,
        out_ptr=ids if cast is None else cast[0],
        scale_ptr=ids if cast is None else cast[1],
        num_pairs=num_pairs,
        num_ids=routing.num_ids,
        num_experts=num_experts,
        num_tiles=num_tiles,
        parts_per_token=parts_per_token,
        stride=0 if hidden_states is None else hidden_states.stride(0),
        num_groups=num_groups,
        HAS_MAP=routing.expert_map is not None,
        IS_CAST=cast is not None,
        IS_OVERLAPPED=is_overlapped,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(triton.next_power_of_2(num_pairs), _BLOCK_PAIRS),
        ROWS=block_rows,
        TILES=_TILES_PER_PASS,
        GROUPS=_COLUMNS // GROUP,
        SIZE=GROUP,
        num_warps=4,
        **options,
    )
    return RowTiles(expert_of_tile, pairs), cast


def _cast_buffers(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, width = hidden_states.shape
    values = torch.empty(
        (num_tokens, width), dtype=torch.float8_e4m3fn, device=hidden_states.device
    )
    scale = hidden_states.new_empty((num_tokens, width // GROUP), dtype=torch.float32)
    return values, scale
