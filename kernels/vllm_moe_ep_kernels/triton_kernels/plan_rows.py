"""Give each (token, slot) pair its row, in two launches and without an atomic operation.

The first launch counts each block's pairs per expert. In the second every block adds up the
counts for itself, which gives the experts' starts and what earlier blocks hold. A step of one
block needs the second launch alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.triton_kernels.local_ids import load_local_ids

_BLOCK_PAIRS = 256
_EXPERTS_PER_PASS = 32
_WARPS = 8


@triton.jit
def _count_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    num_pairs,
    num_ids,
    num_experts,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
    for first in range(0, num_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        hits = (local[:, None] == experts[None, :]).to(tl.int32)
        counts = tl.sum(hits, axis=0)
        tl.store(counts_ptr + block * num_experts + experts, counts, mask=experts < num_experts)


@triton.jit
def _assign_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,
    row_ptr,
    ends_ptr,
    num_pairs,
    num_ids,
    num_experts,
    num_blocks,
    ALIGNMENT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_ONE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    local = load_local_ids(ids_ptr, map_ptr, pairs, num_pairs, num_ids, HAS_MAP)
    rows = tl.full([BLOCK], -1, tl.int32)
    base = tl.sum(tl.zeros([EXPERTS], tl.int32), axis=0)
    for first in range(0, num_experts, EXPERTS):
        experts = first + tl.arange(0, EXPERTS)
        is_expert = experts < num_experts
        hits = (local[:, None] == experts[None, :]).to(tl.int32)
        if IS_ONE_BLOCK:
            totals = tl.sum(hits, axis=0)
            earlier = tl.zeros([EXPERTS], tl.int32)
        else:
            totals = tl.zeros([EXPERTS], tl.int32)
            earlier = tl.zeros([EXPERTS], tl.int32)
            for first_block in range(0, num_blocks, EXPERTS):
                blocks = first_block + tl.arange(0, EXPERTS)
                counts = tl.load(
                    counts_ptr + blocks[:, None] * num_experts + experts[None, :],
                    mask=(blocks < num_blocks)[:, None] & is_expert[None, :],
                    other=0,
                )
                totals += tl.sum(counts, axis=0)
                earlier += tl.sum(tl.where(blocks[:, None] < block, counts, 0), axis=0)
        aligned = (totals + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        starts = base + tl.cumsum(aligned, axis=0) - aligned
        place = (starts + earlier)[None, :] + tl.cumsum(hits, axis=0) - 1
        # A pair hits one expert at most: -1 plus (its row plus 1) is the row.
        rows += tl.sum(hits * (place + 1), axis=1)
        if block == 0:
            tl.store(ends_ptr + experts, starts + totals, mask=is_expert)
        base += tl.sum(aligned, axis=0)
    tl.store(row_ptr + pairs, rows, mask=pairs < num_pairs)


def plan_rows(
    topk_ids: Tensor, expert_map: Tensor | None, num_local_experts: int, alignment: int
) -> tuple[Tensor, Tensor]:
    """As the reference of this name; no value travels to the host."""
    ids = topk_ids.contiguous()
    num_pairs = ids.numel()
    row_of_pair = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    expert_ends = torch.empty(num_local_experts, dtype=torch.int32, device=ids.device)
    num_blocks = triton.cdiv(num_pairs, _BLOCK_PAIRS)
    has_map = expert_map is not None
    num_ids = num_local_experts if expert_map is None else expert_map.shape[0]
    ids_and_map = (ids, ids if expert_map is None else expert_map)
    sizes = {"BLOCK": _BLOCK_PAIRS, "EXPERTS": _EXPERTS_PER_PASS, "HAS_MAP": has_map}
    counts = expert_ends
    if num_blocks > 1:
        counts = ids.new_empty((num_blocks, num_local_experts), dtype=torch.int32)
        _count_kernel[(num_blocks,)](
            *ids_and_map, counts, num_pairs, num_ids, num_local_experts, num_warps=_WARPS, **sizes
        )
    _assign_kernel[(max(num_blocks, 1),)](
        *ids_and_map,
        counts,
        row_of_pair,
        expert_ends,
        num_pairs,
        num_ids,
        num_local_experts,
        num_blocks,
        ALIGNMENT=alignment,
        IS_ONE_BLOCK=num_blocks <= 1,
        num_warps=_WARPS,
        **sizes,
    )
    return row_of_pair, expert_ends
