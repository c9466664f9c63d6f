"""Weighted sum of each token's pairs: a gather in fixed order, no atomic operation."""

import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting
from vllm_moe_ep_kernels.triton_kernels.few_rows_loads import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from vllm_moe_ep_kernels.triton_kernels.local_ids import load_local_ids

_COLUMNS = 512


@triton.jit(do_not_specialize=["num_pairs", "num_ids", "weight_stride"])
def _combine_kernel(
    part_ptr,
    weight_ptr,
    out_ptr,
    ids_ptr,
    map_ptr,
    num_pairs,
    num_ids,
    weight_stride,
    out_stride,
    width,
    TOP_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    IS_OVERLAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_kernel_before(IS_OVERLAPPED)
    let_next_kernel_start(IS_OVERLAPPED)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        is_local = load_local_ids(ids_ptr, map_ptr, pair, num_pairs, num_ids, HAS_MAP) >= 0
        weight = tl.load(weight_ptr + token * weight_stride + slot, mask=is_local, other=0.0)
        # Masked loads, not a branch: the loads of all slots are under way together.
        is_read = columns < tl.where(is_local, width, 0)
        row = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(NUM_PARTS):
            start = part_ptr + (part * num_pairs + pair) * width
            row += tl.load(start + columns, mask=is_read, other=0.0).to(tl.float32)
        total += row * weight.to(tl.float32)
    places = out_ptr + token * out_stride + columns
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def few_rows_combine(
    parts: Tensor,
    routing: PairRouting,
    topk_weights: Tensor,
    out: Tensor,
    is_overlapped: bool = False,
) -> None:
    """As the reference of this name.

    Args:
        is_overlapped: as of `ProductTiles`.
    """
    num_tokens, width = out.shape
    if num_tokens == 0:
        return
    ids = routing.topk_ids.contiguous()
    options = {"launch_pdl": True} if is_overlapped else {}
    _combine_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        part_ptr=parts,
        weight_ptr=topk_weights,
        out_ptr=out,
        ids_ptr=ids,
        map_ptr=ids if routing.expert_map is None else routing.expert_map,
        num_pairs=routing.num_pairs,
        num_ids=routing.num_ids,
        weight_stride=topk_weights.stride(0),
        out_stride=out.stride(0),
        width=width,
        TOP_K=routing.topk_ids.shape[1],
        NUM_PARTS=parts.shape[0],
        HAS_MAP=routing.expert_map is not None,
        IS_OVERLAPPED=is_overlapped,
        BLOCK=_COLUMNS,
        **options,
    )
