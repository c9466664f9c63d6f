"""Weighted sum of each token's expert rows: a gather in fixed order, no atomic operation."""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit
def _combine_kernel(
    in_ptr,
    row_ptr,
    weight_ptr,
    out_ptr,
    in_stride,
    weight_stride,
    out_stride,
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + slot).to(tl.int64)
        is_routed = row >= 0
        weight = tl.load(weight_ptr + token * weight_stride + slot, mask=is_routed, other=0.0)
        # Masked loads, not a branch: the loads of all slots are under way together.
        is_read = columns < tl.where(is_routed, width, 0)
        values = tl.load(in_ptr + row * in_stride + columns, mask=is_read, other=0.0)
        total += values.to(tl.float32) * weight.to(tl.float32)
    places = out_ptr + token * out_stride + columns
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def combine_rows(rows: Tensor, row_of_pair: Tensor, topk_weights: Tensor, out: Tensor) -> None:
    """As the reference of this name."""
    num_tokens, width = out.shape
    _combine_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        rows,
        row_of_pair,
        topk_weights,
        out,
        rows.stride(0),
        topk_weights.stride(0),
        out.stride(0),
        width,
        TOP_K=row_of_pair.shape[1],
        BLOCK=_COLUMNS,
    )
