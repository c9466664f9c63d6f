"""SwiGLU on the rows that pairs have, in bf16 or cast to fp8."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.quantise import quantise
from vllm_moe_ep_kernels.reference.swiglu import swiglu

MAX_E4M3 = 448.0
GROUP_SIZE = 128


def swiglu_rows(
    gate_up: Tensor, row_of_pair: Tensor, swiglu_limit: float | None, out: Tensor
) -> None:
    """out[row] = silu(min(gate, L)) * clamp(up, -L, L) for each row of a pair; fp32 arithmetic.

    Args:
        gate_up: bf16 [rows, 2 * width], gate columns first.
        row_of_pair: int32 [num_tokens, top_k]; -1 names no row. Other rows stay untouched.
        swiglu_limit: L, or None.
        out: bf16 [rows, width].
    """
    rows = row_of_pair[row_of_pair >= 0].long()
    out[rows] = _activated(gate_up[rows], swiglu_limit, out.dtype)


def swiglu_rows_fp8(
    gate_up: Tensor, row_of_pair: Tensor, swiglu_limit: float | None, out: Tensor, scale: Tensor
) -> None:
    """The same in fp8, each group of 128 columns over its own scale; not rounded to bf16 before.

    Args:
        out: float8_e4m3fn [rows, width], width a multiple of 128.
        scale: fp32 [rows, width / 128], any strides.
    """
    rows = row_of_pair[row_of_pair >= 0].long()
    activated = _activated(gate_up[rows], swiglu_limit, torch.float32)
    out[rows], scale[rows] = quantise(activated, (1, GROUP_SIZE), MAX_E4M3, False, False)


def _activated(gate_up: Tensor, swiglu_limit: float | None, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(gate_up.shape[0], dtype=torch.float32, device=gate_up.device)
    return swiglu(gate_up, ones, swiglu_limit, dtype)
