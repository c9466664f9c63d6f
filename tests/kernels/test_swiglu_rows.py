"""SwiGLU on pair rows, in bf16 and fp8, for each implementation."""

import pytest
import torch
from torch import Tensor

from tests.kernels.row_kernels import implementations, random_rows, row_kernels

SIZES = [(1, 1, 128), (5, 3, 384), (9, 8, 1152)]


def activated(gate_up: Tensor, limit: float | None) -> Tensor:
    """fp64."""
    gate, up = gate_up.double().chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


@implementations
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), SIZES)
def test_bf16_and_fp8(
    implementation: str, num_tokens: int, top_k: int, width: int, limit: float | None
) -> None:
    kernels = row_kernels(implementation)
    num_rows = 2 * num_tokens * top_k
    gate_up = torch.randn(num_rows, 2 * width).bfloat16()
    rows = random_rows(num_tokens, top_k, num_rows)
    rows[0, 0] = 0
    gate_up[0, width + 5] = torch.nan
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[rows >= 0].long()] = True
    gate_up[~used] = torch.nan
    expected = activated(gate_up, limit)
    inputs = (gate_up.to(kernels.device), rows.to(kernels.device), limit)

    out = torch.full((num_rows, width), 7.0).bfloat16().to(kernels.device)
    kernels.get("swiglu_rows")(*inputs, out)
    torch.testing.assert_close(
        out.cpu()[used].double(), expected[used], rtol=kernels.bf16_rtol, atol=1e-6, equal_nan=True
    )
    assert bool((out.cpu()[~used] == 7.0).all())

    values = torch.zeros(num_rows, width).to(torch.float8_e4m3fn).to(kernels.device)
    scale = torch.full((width // 128, num_rows), -1.0, device=kernels.device).T
    kernels.get("swiglu_rows", "swiglu_rows_fp8")(*inputs, values, scale)
    values, scale = values.cpu(), scale.cpu()
    groups = expected[used].view(-1, width // 128, 128)
    wanted_scale = groups.abs().amax(2) / 448
    torch.testing.assert_close(
        scale[used].double(), wanted_scale, rtol=1e-5, atol=0, equal_nan=True
    )
    assert bool((scale[~used] == -1).all())
    wanted = (groups / wanted_scale[:, :, None]).float().flatten(1)
    assert int(wanted.isnan().sum()) == 128
    kernels.check_fp8(values[used], wanted)
