"""Second projection, in parts or summed over slots: against fp64, for each implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.few_rows import (
    WAYS,
    Case,
    cast_rows,
    few_row_kernels,
    make_case,
    planned,
    random_routing,
    row_errors,
    tiles_of,
)
from tests.kernels.row_kernels import RowKernels, implementations
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting

ways = pytest.mark.parametrize(("form", "is_cast_before"), WAYS)
K, N = 384, 128


def make_down_case(form: str, routing: PairRouting) -> Case:
    """Rows of pairs without an expert are NaN."""
    case = make_case(form, routing.num_pairs, N, K, routing)
    case.rows[torch.tensor(case.local()) < 0] = torch.nan
    return case


def products(case: Case, span: slice = slice(None)) -> Tensor:
    """fp64 [num_pairs, n] over columns of k, 0 for pairs without an expert."""
    rows = torch.where(case.rows.isnan().all(1, keepdim=True), 0, case.rows)
    seen = Case(rows, case.weight, case.weight_scale, case.numbers, case.routing).seen_rows()
    out = torch.zeros(case.routing.num_pairs, N, dtype=torch.float64)
    for pair, expert in enumerate(case.local()):
        if expert >= 0:
            out[pair] = case.numbers[expert][:, span] @ seen[pair, span]
    return out


def inputs_of(kernels: RowKernels, case: Case, is_cast_before: bool) -> tuple[Any, ...]:
    moved = case.on(kernels.device)
    rows, row_scale = moved.rows, None
    if is_cast_before:
        rows, row_scale = (part.to(kernels.device) for part in cast_rows(case.rows))
    return rows, row_scale, moved.weight, moved.weight_scale


@implementations
@ways
@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize(("num_parts", "dtype"), [(1, torch.bfloat16), (2, torch.float32)])
def test_parts(
    implementation: str,
    form: str,
    is_cast_before: bool,
    has_tiles: bool,
    num_parts: int,
    dtype: torch.dtype,
) -> None:
    kernels = few_row_kernels(implementation)
    case = make_down_case(form, random_routing(7, 3, 4, has_map=has_tiles))
    routing = case.on(kernels.device).routing
    if has_tiles:
        routing = planned(kernels, routing, 8)
    out = torch.full((num_parts, 21, N), torch.nan, dtype=dtype, device=kernels.device)
    inputs = inputs_of(kernels, case, is_cast_before)
    tiles = tiles_of(kernels, block_rows=8, has_descriptors=has_tiles)
    kernels.get("few_rows_down")(*inputs, routing, out, **tiles)
    out = out.cpu()
    is_local = torch.tensor(case.local()) >= 0
    assert bool(out[:, ~is_local].isnan().all())
    step = 128 * -(-3 // num_parts)
    for part in range(num_parts):
        wanted = products(case, slice(part * step, (part + 1) * step))
        assert bool((row_errors(out[part][is_local], wanted[is_local]) <= case.limit).all())


@implementations
def test_more_parts_than_groups_are_zero(implementation: str) -> None:
    kernels = few_row_kernels(implementation)
    case = make_down_case("fp8", random_routing(3, 2, 4, has_map=False))
    out = torch.full((5, 6, N), torch.nan, device=kernels.device)
    inputs = inputs_of(kernels, case, False)
    routing = case.on(kernels.device).routing
    kernels.get("few_rows_down")(*inputs, routing, out, **tiles_of(kernels))
    is_local = torch.tensor(case.local()) >= 0
    assert bool((out.cpu()[3:, is_local] == 0).all())
    total = out.cpu().sum(0)[is_local]
    assert bool((row_errors(total, products(case)[is_local]) <= case.limit).all())


@implementations
@ways
@pytest.mark.parametrize("columns", [32, 128])
def test_combined(implementation: str, form: str, is_cast_before: bool, columns: int) -> None:
    kernels = few_row_kernels(implementation)
    for num_tokens in (1, 2, 3):
        routing = random_routing(num_tokens, 5, 4, has_map=num_tokens == 3)
        routing.topk_ids[0, :2] = torch.tensor([-1, 1])
        case = make_down_case(form, routing)
        is_local = (torch.tensor(case.local()) >= 0).view(num_tokens, 5)
        weights = torch.where(is_local, torch.rand(num_tokens, 5), torch.nan)
        out = torch.full((num_tokens, N), torch.nan, device=kernels.device).bfloat16()
        tiles = tiles_of(kernels, block_columns=columns, has_descriptors=columns == 128)
        kernels.get("few_rows_down", "few_rows_down_combined")(
            *inputs_of(kernels, case, is_cast_before),
            case.on(kernels.device).routing,
            weights.to(kernels.device),
            out,
            **tiles,
        )
        weighted = products(case).view(num_tokens, 5, N) * weights.nan_to_num(0.0)[..., None]
        assert bool((row_errors(out, weighted.double().sum(1)) <= case.limit).all())


@implementations
def test_combined_without_a_local_expert_is_zero(implementation: str) -> None:
    kernels = few_row_kernels(implementation)
    routing = PairRouting(torch.full((2, 3), -1, dtype=torch.int32), None, 4)
    case = make_down_case("fp8", routing)
    out = torch.full((2, N), torch.nan, device=kernels.device)
    weights = torch.full((2, 3), torch.nan, device=kernels.device)
    kernels.get("few_rows_down", "few_rows_down_combined")(
        *inputs_of(kernels, case, False),
        case.on(kernels.device).routing,
        weights,
        out,
        **tiles_of(kernels),
    )
    assert bool((out == 0).all())
