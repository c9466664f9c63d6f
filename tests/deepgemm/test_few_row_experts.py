"""The experts of few rows, by each implementation of their kernels, against the fp64 oracle."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import quant_oracle
import torch
from oracle import Fixture, make_fixture, rel_l2
from torch import Tensor

from tests.kernels.few_rows import ACTIVATION, few_row_kernels
from tests.kernels.row_kernels import implementations
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.few_row_table import FewRowStep, few_row_step
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128
from vllm_moe_ep.stages import RoutedTokens
from vllm_moe_ep_kernels.product_tiles import ProductTiles

# bf16 rows between the products; for fp8 also single roundings that fall the other way.
LIMITS = {"bf16": 5e-3, "fp8": 0.04}
forms = pytest.mark.parametrize("form", ["bf16", "fp8"])
SMALL, WHOLE = ProductTiles(block_rows=8), ProductTiles(block_rows=8, block_columns=128)
STEPS = {
    "lookup": FewRowStep(SMALL, WHOLE),
    "lookup, in parts": FewRowStep(SMALL, SMALL, num_parts=2),
    "combined": FewRowStep(SMALL, SMALL, is_combined=True),
    "planned": FewRowStep(SMALL, WHOLE, is_planned=True),
    "planned, inner fp8": FewRowStep(WHOLE, SMALL, is_planned=True, is_inner_fp8=True),
}
steps = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


def cast(row: Tensor) -> Tensor:
    return quant_oracle.quantise_dequantise(row, ACTIVATION)


def stored(weight: Tensor) -> tuple[ScaledWeight, Tensor]:
    quantised = quantise(weight.float(), FP8_128X128)
    prepared = prepare_fp8_weight("w", quantised.values, quantised.scale, (128, 128), 9)
    return prepared, dequantise(quantised)


def weights_of(fixture: Fixture, form: str) -> tuple[HopperWeights, Fixture]:
    """The weights, and the fixture whose answer they give."""
    if form == "bf16":
        return HopperWeights(fixture.w13_weight, fixture.w2_weight), fixture
    w13, w13_numbers = stored(fixture.w13_weight)
    w2, w2_numbers = stored(fixture.w2_weight)
    return HopperWeights(w13, w2), replace(fixture, w13_weight=w13_numbers, w2_weight=w2_numbers)


def answer(fixture: Fixture, form: str, limit: float | None = None) -> Tensor:
    return fixture.routed(limit, cast if form == "fp8" else None)


def experts_of(
    implementation: str,
    weights: HopperWeights,
    step: FewRowStep | None = None,
    expert_map: Tensor | None = None,
    limit: float | None = None,
) -> Callable[[Fixture], Tensor]:
    device = few_row_kernels(implementation).device
    experts = FewRowExperts(
        _on(weights, device),
        load_few_row_kernels(implementation),
        16,
        None if expert_map is None else expert_map.to(device),
        limit,
        None if step is None else lambda num_tokens, top_k: step,
    )

    def run(fixture: Fixture) -> Tensor:
        tensors = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
        return experts(RoutedTokens(*(tensor.to(device) for tensor in tensors))).cpu()

    return run


def _on(weights: HopperWeights, device: str) -> HopperWeights:
    def move(weight: Tensor | ScaledWeight) -> Tensor | ScaledWeight:
        if isinstance(weight, Tensor):
            return weight.to(device)
        return replace(weight, values=weight.values.to(device), scale=weight.scale.to(device))

    return HopperWeights(move(weights.w13), move(weights.w2))


@forms
@steps
def test_equals_the_oracle(form: str, step: FewRowStep) -> None:
    limit = 0.5 if form == "fp8" else None
    fixture = make_fixture(torch.bfloat16, 5, moe_intermediate_size=256)
    weights, exact = weights_of(fixture, form)
    output = experts_of("reference", weights, step, limit=limit)(exact)
    assert output.dtype == torch.bfloat16
    assert rel_l2(output, answer(exact, form, limit)) <= LIMITS[form]


@implementations
@forms
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_steps_of_the_table(implementation: str, form: str, num_tokens: int) -> None:
    weights, exact = weights_of(make_fixture(torch.bfloat16, num_tokens), form)
    output = experts_of(implementation, weights)(exact)
    assert rel_l2(output, answer(exact, form)) <= LIMITS[form]


@forms
@pytest.mark.parametrize("num_tokens", [0, 65])
def test_no_tokens_and_many(form: str, num_tokens: int) -> None:
    weights, exact = weights_of(make_fixture(torch.bfloat16, num_tokens), form)
    output = experts_of("reference", weights)(exact)
    assert rel_l2(output, answer(exact, form)) <= LIMITS[form]


@steps
def test_a_share_of_the_experts(step: FewRowStep) -> None:
    form = "fp8"
    fixture = make_fixture(torch.bfloat16, 9)
    fixture.topk_ids[3] = torch.tensor([-1, 16, 2**30, -5])
    fixture.topk_weights[3] = torch.nan
    held = torch.tensor([11, 2, 5])
    expert_map = torch.full((16,), -1, dtype=torch.int32)
    expert_map[held] = torch.arange(3, dtype=torch.int32)
    local = replace(fixture, w13_weight=fixture.w13_weight[held], w2_weight=fixture.w2_weight[held])
    weights, exact = weights_of(local, form)
    output = experts_of("reference", weights, step, expert_map)(fixture)
    is_known = (fixture.topk_ids >= 0) & (fixture.topk_ids < 16)
    ids = expert_map[torch.where(is_known, fixture.topk_ids, 0).long()]
    ids = torch.where(is_known, ids, -1)
    assert rel_l2(output, answer(replace(exact, topk_ids=ids), form)) <= LIMITS[form]
    assert bool((output[(ids < 0).all(dim=1)] == 0).all())


@steps
def test_same_bits_in_any_order_of_the_rows_and_nan_in_its_own(step: FewRowStep) -> None:
    weights, exact = weights_of(make_fixture(torch.bfloat16, 6), "fp8")
    run = experts_of("reference", weights, step)
    clean = run(exact)
    assert torch.equal(run(exact), clean)
    order = torch.randperm(6)
    moved = replace(
        exact,
        hidden_states=exact.hidden_states[order].clone(),
        topk_ids=exact.topk_ids[order],
        topk_weights=exact.topk_weights[order],
    )
    assert torch.equal(run(moved), clean[order])
    moved.hidden_states[2, 7] = torch.nan
    dirty = run(moved)
    others = torch.arange(6) != 2
    assert bool(dirty[2].isnan().all()) and torch.equal(dirty[others], clean[order][others])


def test_refusals() -> None:
    fixture = make_fixture(torch.bfloat16, 3)
    weights, _ = weights_of(fixture, "bf16")
    run = experts_of("reference", weights)
    with pytest.raises(UnsupportedError, match="found torch.float16"):
        run(replace(fixture, hidden_states=fixture.hidden_states.half()))
    with pytest.raises(ValueError, match=r"needs a w2 of"):
        experts_of("reference", HopperWeights(fixture.w13_weight, fixture.w2_weight[1:]))
    with pytest.raises(ValueError, match="found block_rows 8 and 16"):
        FewRowStep(SMALL, ProductTiles(block_rows=16), is_planned=True)
    with pytest.raises(ValueError, match="neither planned nor split"):
        FewRowStep(SMALL, SMALL, is_combined=True, num_parts=2)
    with pytest.raises(ValueError, match="128 columns, found 64"):
        FewRowStep(SMALL, SMALL, is_inner_fp8=True)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("top_k", "num_experts"), [(8, 32), (8, 256), (6, 64), (6, 48)])
def test_every_step_of_the_table_fits_the_kernels(
    top_k: int, num_experts: int, is_fp8: bool
) -> None:
    """An SM90 program has 227 KiB of shared memory; each stage holds its tiles."""
    for num_tokens in range(1, 1025):
        step = few_row_step(num_tokens, top_k, num_experts, is_fp8)
        for tiles, num_weights in ((step.gate_up, 2), (step.down, 1)):
            weight_bytes = num_weights * tiles.block_columns * 128 * (1 if is_fp8 else 2)
            stage_bytes = weight_bytes + tiles.block_rows * 128 * 2
            assert tiles.num_stages * stage_bytes <= 227 * 1024
