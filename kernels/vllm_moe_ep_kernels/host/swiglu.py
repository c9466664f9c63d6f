"""SwiGLU on the CPU; see the reference of the same name."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(
    gate_up: Tensor,
    row_weight: Tensor,
    swiglu_limit: float | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """row_weight * silu(min(gate, L)) * clamp(up, -L, L), computed in fp32.

    Args:
        gate_up: [rows, 2 * moe_intermediate_size], gate columns first, any float dtype.
        row_weight: fp32 [rows].
        swiglu_limit: L, or None for no clamp.
        out_dtype: dtype of the result.

    Returns:
        [rows, moe_intermediate_size] in out_dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=1)
    if swiglu_limit is not None:
        gate = gate.clamp(max=swiglu_limit)
        up = up.clamp(-swiglu_limit, swiglu_limit)
    return F.silu(gate).mul_(up).mul_(row_weight[:, None]).to(out_dtype)
