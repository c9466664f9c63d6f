"""First projection with SwiGLU, pair by pair: against fp64, for each implementation."""

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

forms = pytest.mark.parametrize("form", ["fp8", "bf16"])
ways = pytest.mark.parametrize(("form", "is_cast_before"), WAYS)
K, N = 256, 128


def expected(case: Case, limit: float | None) -> Tensor:
    """fp64 [num_pairs, n], 0 in rows of pairs without an expert."""
    rows, top_k = case.seen_rows(), case.routing.topk_ids.shape[1]
    out = torch.zeros(case.routing.num_pairs, case.numbers.shape[1] // 2, dtype=torch.float64)
    for pair, expert in enumerate(case.local()):
        if expert >= 0:
            gate, up = (case.numbers[expert] @ rows[pair // top_k]).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[pair] = gate * torch.sigmoid(gate) * up
    return out


def run(
    kernels: RowKernels,
    case: Case,
    limit: float | None = None,
    has_tiles: bool = False,
    is_cast_before: bool = False,
    **tiles: Any,
) -> Tensor:
    """bf16 [num_pairs, n] on CPU; rows that nothing wrote are NaN."""
    moved = case.on(kernels.device)
    routing = moved.routing
    if has_tiles:
        routing = planned(kernels, routing, tiles.get("block_rows", 16))
    rows, row_scale = moved.rows, None
    if is_cast_before:
        rows, row_scale = (part.to(kernels.device) for part in cast_rows(case.rows))
    n = case.weight.shape[1] // 2
    out = torch.full((routing.num_pairs, n), torch.nan, device=kernels.device).bfloat16()
    kernels.get("few_rows_gate_up")(
        rows,
        row_scale,
        moved.weight,
        moved.weight_scale,
        routing,
        limit,
        out,
        None,
        **tiles_of(kernels, **tiles),
    )
    return out.cpu()


def check(out: Tensor, case: Case, limit: float | None = None) -> None:
    is_local = torch.tensor(case.local()) >= 0
    assert bool(out[~is_local].isnan().all())
    errors = row_errors(out[is_local], expected(case, limit)[is_local])
    assert bool((errors <= case.limit).all()), errors


@implementations
@forms
def test_every_small_number_of_tokens(implementation: str, form: str) -> None:
    kernels = few_row_kernels(implementation)
    for num_tokens in [*range(1, 10), 17, 33]:
        routing = random_routing(num_tokens, 2, 5, has_map=num_tokens % 2 == 0)
        case = make_case(form, num_tokens, 2 * N, K, routing)
        check(run(kernels, case), case)


@implementations
@ways
@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize(
    "tiles",
    [
        {"block_rows": 8, "block_columns": 32},
        {"block_rows": 16, "block_columns": 128, "has_descriptors": True},
    ],
)
def test_ways_to_cut_it(
    implementation: str, form: str, has_tiles: bool, is_cast_before: bool, tiles: dict[str, Any]
) -> None:
    kernels = few_row_kernels(implementation)
    case = make_case(form, 11, 4 * N, K, random_routing(11, 3, 4, has_map=True))
    out = run(kernels, case, 0.5, has_tiles, is_cast_before, **tiles)
    check(out, case, 0.5)


@implementations
def test_result_in_fp8(implementation: str) -> None:
    kernels = few_row_kernels(implementation)
    case = make_case("fp8", 6, 4 * N, K, random_routing(6, 2, 4, has_map=False))
    moved = case.on(kernels.device)
    is_local = torch.tensor(case.local()) >= 0
    out = torch.zeros(12, 2 * N, device=kernels.device).to(torch.float8_e4m3fn)
    scale = torch.full((12, 2), -1.0, device=kernels.device)
    kernels.get("few_rows_gate_up")(
        moved.rows,
        None,
        moved.weight,
        moved.weight_scale,
        moved.routing,
        None,
        out,
        scale,
        **tiles_of(kernels, block_columns=128),
    )
    out, scale = out.cpu(), scale.cpu()
    assert bool((scale[~is_local] == -1).all()) and bool((out.float()[~is_local] == 0).all())
    groups = expected(case, None)[is_local].view(-1, 2, 128)
    # Products of fp8 tensor cores are summed in fewer bits than fp32 has.
    torch.testing.assert_close(
        scale[is_local].double(), groups.abs().amax(2) / 448, rtol=1e-2, atol=0
    )
    numbers = out[is_local].double().view(-1, 2, 128) * scale[is_local].double()[..., None]
    # One rounding to 3 bits of mantissa.
    assert bool((row_errors(numbers.flatten(1), groups.flatten(1)) <= 0.04).all())


@implementations
@forms
@pytest.mark.parametrize("has_tiles", [False, True])
def test_one_expert_takes_all_pairs_or_none_does(
    implementation: str, form: str, has_tiles: bool
) -> None:
    kernels = few_row_kernels(implementation)
    for expert in (2, -1, 7):
        routing = PairRouting(torch.full((21, 2), expert, dtype=torch.int64), None, 3)
        case = make_case(form, 21, 2 * N, K, routing)
        check(run(kernels, case, has_tiles=has_tiles), case)


@implementations
@ways
def test_nan_stays_in_its_row(implementation: str, form: str, is_cast_before: bool) -> None:
    kernels = few_row_kernels(implementation)
    routing = PairRouting(torch.randint(0, 3, (9, 2), dtype=torch.int32), None, 3)
    case = make_case(form, 9, 2 * N, K, routing)
    clean = run(kernels, case, is_cast_before=is_cast_before)
    case.rows[4, 200] = torch.nan
    dirty = run(kernels, case, is_cast_before=is_cast_before)
    others = torch.arange(18) // 2 != 4
    assert bool(dirty[~others].isnan().all())
    assert torch.equal(dirty[others], clean[others])


@implementations
def test_no_tokens(implementation: str) -> None:
    kernels = few_row_kernels(implementation)
    routing = PairRouting(torch.empty(0, 2, dtype=torch.int32), None, 3)
    assert run(kernels, make_case("bf16", 0, 2 * N, K, routing)).shape == (0, N)
