"""Weighted sum of a token's pairs and their parts: against fp64, for each implementation."""

import pytest
import torch

from tests.kernels.few_rows import Case, few_row_kernels, random_routing
from tests.kernels.row_kernels import implementations


@implementations
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_parts", "width"), [(1, 1, 1, 128), (9, 6, 3, 1280)]
)
def test_sums_local_pairs_only(
    implementation: str,
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    num_parts: int,
    width: int,
) -> None:
    kernels = few_row_kernels(implementation)
    routing = random_routing(num_tokens, top_k, 4, has_map=num_tokens > 1)
    if num_tokens > 1:
        routing.topk_ids[3] = -1
    empty = torch.empty(0)
    case = Case(empty, empty, None, empty, routing)
    is_local = torch.tensor(case.local()) >= 0
    parts = torch.randn(num_parts, num_tokens * top_k, width).to(dtype)
    parts[:, ~is_local] = torch.nan
    weights = torch.rand(num_tokens, top_k)
    weights[~is_local.view(num_tokens, top_k)] = torch.nan
    out = torch.full((num_tokens, width), torch.nan, device=kernels.device)
    moved = case.on(kernels.device).routing
    kernels.get("few_rows_combine")(
        parts.to(kernels.device), moved, weights.to(kernels.device), out
    )
    pairs = parts.double().sum(0) * weights.double().view(-1, 1)
    wanted = pairs.nan_to_num(0.0).view(num_tokens, top_k, width).sum(1)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    if num_tokens > 1:
        assert bool((out[3] == 0).all())
