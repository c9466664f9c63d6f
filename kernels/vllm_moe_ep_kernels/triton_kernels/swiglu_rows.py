"""SwiGLU on the rows that pairs have, in bf16 or cast to fp8. Padding rows cost nothing."""

import triton
import triton.language as tl
from torch import Tensor

from vllm_moe_ep_kernels.triton_kernels.fp8_cast import cast_groups

_COLUMNS = 1024
_GROUP = 128


@triton.jit
def swiglu(gate, up, limit, HAS_LIMIT: tl.constexpr):
    """fp32; comparisons are false for NaN, which therefore stays."""
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_kernel(
    in_ptr,
    row_ptr,
    out_ptr,
    in_stride,
    out_stride,
    width,
    limit,
    HAS_LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_column = columns < width
        gates = in_ptr + row * in_stride + columns
        gate = tl.load(gates, mask=is_column, other=0.0).to(tl.float32)
        up = tl.load(gates + width, mask=is_column, other=0.0).to(tl.float32)
        activated = swiglu(gate, up, limit, HAS_LIMIT)
        places = out_ptr + row * out_stride + columns
        tl.store(places, activated.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _swiglu_fp8_kernel(
    in_ptr,
    row_ptr,
    out_ptr,
    scale_ptr,
    in_stride,
    out_stride,
    scale_row_stride,
    scale_group_stride,
    width,
    limit,
    HAS_LIMIT: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        is_group = groups * SIZE < width
        columns = groups[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        gates = in_ptr + row * in_stride + columns
        gate = tl.load(gates, mask=is_group[:, None], other=0.0).to(tl.float32)
        up = tl.load(gates + width, mask=is_group[:, None], other=0.0).to(tl.float32)
        stored, scale = cast_groups(swiglu(gate, up, limit, HAS_LIMIT))
        tl.store(out_ptr + row * out_stride + columns, stored, mask=is_group[:, None])
        places = row * scale_row_stride + groups.to(tl.int64) * scale_group_stride
        tl.store(scale_ptr + places, scale, mask=is_group)


def swiglu_rows(
    gate_up: Tensor, row_of_pair: Tensor, swiglu_limit: float | None, out: Tensor
) -> None:
    """As the reference of this name."""
    width = out.shape[1]
    _swiglu_kernel[(row_of_pair.numel(), triton.cdiv(width, _COLUMNS))](
        gate_up,
        row_of_pair,
        out,
        gate_up.stride(0),
        out.stride(0),
        width,
        0.0 if swiglu_limit is None else swiglu_limit,
        HAS_LIMIT=swiglu_limit is not None,
        BLOCK=_COLUMNS,
    )


def swiglu_rows_fp8(
    gate_up: Tensor, row_of_pair: Tensor, swiglu_limit: float | None, out: Tensor, scale: Tensor
) -> None:
    """As the reference of this name, within one fp8 step."""
    width = out.shape[1]
    _swiglu_fp8_kernel[(row_of_pair.numel(), triton.cdiv(width, _COLUMNS))](
        gate_up,
        row_of_pair,
        out,
        scale,
        gate_up.stride(0),
        out.stride(0),
        scale.stride(0),
        scale.stride(1),
        width,
        0.0 if swiglu_limit is None else swiglu_limit,
        HAS_LIMIT=swiglu_limit is not None,
        GROUPS=_COLUMNS // _GROUP,
        SIZE=_GROUP,
    )
