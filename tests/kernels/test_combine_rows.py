"""The weighted sum of pair rows, for each implementation."""

import pytest
import torch

from tests.kernels.row_kernels import implementations, random_rows, row_kernels


@implementations
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), [(1, 1, 64), (5, 3, 300), (9, 8, 1100)])
def test_equals_fp64_and_reads_no_unused_row(
    implementation: str, num_tokens: int, top_k: int, width: int, out_dtype: torch.dtype
) -> None:
    kernels = row_kernels(implementation)
    num_rows = 2 * num_tokens * top_k
    values = torch.randn(num_rows, width).bfloat16()
    rows = random_rows(num_tokens, top_k, num_rows)
    rows[-1] = -1
    used = torch.zeros(num_rows, dtype=torch.bool)
    used[rows[rows >= 0].long()] = True
    values[~used] = torch.nan
    weights = torch.rand(num_tokens, top_k)
    weights[rows < 0] = torch.nan
    out = torch.full((num_tokens, width), torch.nan, dtype=out_dtype, device=kernels.device)
    parts = (tensor.to(kernels.device) for tensor in (values, rows, weights))
    kernels.get("combine_rows")(*parts, out)
    expected = torch.zeros(num_tokens, width, dtype=torch.float64)
    for token in range(num_tokens):
        for slot, row in enumerate(rows[token].tolist()):
            if row >= 0:
                expected[token] += weights[token, slot].double() * values[row].double()
    rtol = kernels.bf16_rtol if out_dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.cpu().double(), expected, rtol=rtol, atol=1e-5)
    assert bool((out[-1] == 0).all())
