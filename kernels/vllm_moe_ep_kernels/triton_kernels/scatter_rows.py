"""Copy each token's row to the rows of its pairs, as it is or cast to fp8 once.

One program reads a part of one token's row and writes it top_k times.
"""

import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.triton_kernels.fp8_cast import cast_groups

_COLUMNS = 1024
_GROUP = 128


@triton.jit
def _scatter_kernel(
    in_ptr, row_ptr, out_ptr, in_stride, out_stride, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(in_ptr + token.to(tl.int64) * in_stride + columns, mask=columns < width)
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + slot)
        is_written = columns < tl.where(row >= 0, width, 0)
        tl.store(out_ptr + row.to(tl.int64) * out_stride + columns, values, mask=is_written)


@triton.jit
def _scatter_fp8_kernel(
    in_ptr,
    row_ptr,
    out_ptr,
    scale_ptr,
    in_stride,
    out_stride,
    scale_row_stride,
    scale_group_stride,
    num_groups,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    places = in_ptr + token.to(tl.int64) * in_stride + columns
    values = tl.load(places, mask=(groups < num_groups)[:, None], other=0.0)
    stored, scale = cast_groups(values.to(tl.float32))
    for slot in tl.static_range(TOP_K):
        row = tl.load(row_ptr + token * TOP_K + slot)
        is_written = groups < tl.where(row >= 0, num_groups, 0)
        row = row.to(tl.int64)
        tl.store(out_ptr + row * out_stride + columns, stored, mask=is_written[:, None])
        scales = scale_ptr + row * scale_row_stride + groups.to(tl.int64) * scale_group_stride
        tl.store(scales, scale, mask=is_written)


def scatter_rows(hidden_states: Tensor, row_of_pair: Tensor, out: Tensor) -> None:
    """As the reference of this name; rows of the first and last argument may be strided."""
    num_tokens, width = hidden_states.shape
    _scatter_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        hidden_states,
        row_of_pair,
        out,
        hidden_states.stride(0),
        out.stride(0),
        width,
        TOP_K=row_of_pair.shape[1],
        BLOCK=_COLUMNS,
    )


def scatter_rows_fp8(
    hidden_states: Tensor, row_of_pair: Tensor, out: Tensor, scale: Tensor
) -> None:
    """As the reference of this name, within one fp8 step."""
    num_tokens, width = hidden_states.shape
    _scatter_fp8_kernel[(num_tokens, triton.cdiv(width, _COLUMNS))](
        hidden_states,
        row_of_pair,
        out,
        scale,
        hidden_states.stride(0),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        width // _GROUP,
        TOP_K=row_of_pair.shape[1],
        GROUPS=_COLUMNS // _GROUP,
        SIZE=_GROUP,
    )
