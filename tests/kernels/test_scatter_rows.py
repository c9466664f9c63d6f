"""Token rows to pair rows, plain and in fp8, for each implementation."""

import pytest
import torch

from tests.kernels.row_kernels import implementations, random_rows, row_kernels

SIZES = [(1, 1, 128), (5, 3, 256), (9, 8, 1152)]


@implementations
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), SIZES)
def test_copies(implementation: str, num_tokens: int, top_k: int, width: int) -> None:
    kernels = row_kernels(implementation)
    hidden = torch.randn(num_tokens, width).bfloat16()
    rows = random_rows(num_tokens, top_k, 2 * num_tokens * top_k)
    out = torch.full((2 * num_tokens * top_k, width), 7.0).bfloat16().to(kernels.device)
    kernels.get("scatter_rows")(hidden.to(kernels.device), rows.to(kernels.device), out)
    expected = torch.full_like(out, 7.0, device="cpu")
    for token in range(num_tokens):
        for row in rows[token].tolist():
            if row >= 0:
                expected[row] = hidden[token]
    assert torch.equal(out.cpu(), expected)


@implementations
@pytest.mark.parametrize(("num_tokens", "top_k", "width"), SIZES)
def test_casts(implementation: str, num_tokens: int, top_k: int, width: int) -> None:
    kernels = row_kernels(implementation)
    hidden = (torch.randn(num_tokens, width) * 10.0 ** torch.randn(num_tokens, 1)).bfloat16()
    hidden[0, 3], hidden[-1, 100] = 1e30, torch.nan
    hidden[0, 4:9] = torch.tensor([0.0, -0.0, 1e-30, -1e30, 5e29]).bfloat16()
    rows = random_rows(num_tokens, top_k, 2 * num_tokens * top_k)
    num_rows = 2 * num_tokens * top_k
    out = torch.zeros(num_rows, width).to(torch.float8_e4m3fn).to(kernels.device)
    # MN-major, as DeepGEMM reads it.
    scale = torch.full((width // 128, num_rows), -1.0, device=kernels.device).T
    kernels.get("scatter_rows", "scatter_rows_fp8")(
        hidden.to(kernels.device), rows.to(kernels.device), out, scale
    )
    out, scale = out.cpu(), scale.cpu()
    untouched = torch.ones(num_rows, dtype=torch.bool)
    for token in range(num_tokens):
        groups = hidden[token].double().view(-1, 128)
        wanted_scale = (groups.abs().amax(1) / 448).float()
        wanted = (groups / wanted_scale[:, None].double()).float()
        for row in (row for row in rows[token].tolist() if row >= 0):
            untouched[row] = False
            torch.testing.assert_close(scale[row], wanted_scale, rtol=1e-6, atol=0, equal_nan=True)
            kernels.check_fp8(out[row], wanted.flatten())
    assert bool((scale[untouched] == -1).all())
    assert bool((out[untouched].float() == 0).all())
