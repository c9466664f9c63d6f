"""SwiGLU with an optional clamp and a weight per row."""

import torch
from torch import Tensor


def swiglu(
    gate_up: Tensor,
    row_weight: Tensor,
    swiglu_limit: float | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """row_weight * silu(min(gate, L)) * clamp(up, -L, L), computed in fp32.

    silu(x) = x / (1 + exp(-x)). Without a limit nothing is clamped. NaN stays in its own row.

    Args:
        gate_up: [rows, 2 * moe_intermediate_size], gate columns first, any float dtype.
        row_weight: fp32 [rows].
        swiglu_limit: L, or None.
        out_dtype: dtype of the result.

    Returns:
        [rows, moe_intermediate_size] in out_dtype.
    """
    width = gate_up.shape[1] // 2
    gate = gate_up[:, :width].to(torch.float32)
    up = gate_up[:, width:].to(torch.float32)
    if swiglu_limit is not None:
        gate = torch.clamp(gate, max=swiglu_limit)
        up = torch.clamp(up, min=-swiglu_limit, max=swiglu_limit)
    activated = gate / (1 + torch.exp(-gate)) * up
    return (activated * row_weight[:, None]).to(out_dtype)
