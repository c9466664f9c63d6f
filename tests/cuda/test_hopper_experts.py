"""The SM90 experts with the Triton row kernels and the real library, against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch
from oracle import Fixture, rel_l2
from torch import Tensor

from tests.cuda.test_deepgemm_experts import NUM_EXPERTS, Case, random_fixture
from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128
from vllm_moe_ep.stages import RoutedTokens

LIMITS = {"bf16": 1e-2, "fp8": 0.06}
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
each_form = pytest.mark.parametrize("form", ["bf16", "fp8"])
each_alignment = pytest.mark.parametrize("alignment", [64, 128])


def stored(weight: Tensor) -> tuple[ScaledWeight, Tensor]:
    quantised = quantise(weight.float(), FP8_128X128)
    prepared = prepare_fp8_weight("w", quantised.values, quantised.scale, (128, 128), 9)
    return prepared, dequantise(quantised)


def experts_of(
    fixture: Fixture,
    form: str,
    expert_map: Tensor | None = None,
    max_pass_rows: int | None = None,
) -> tuple[HopperExperts, Fixture]:
    """The experts, and the fixture whose answer they give."""
    kernels = load_row_kernels("triton_kernels")
    if form == "bf16":
        weights = HopperWeights(fixture.w13_weight, fixture.w2_weight)
        bundle = deep_gemm("bf16")
        experts = HopperExperts(bundle, weights, kernels, expert_map, max_pass_rows=max_pass_rows)
        return experts, fixture
    w13, w13_numbers = stored(fixture.w13_weight)
    w2, w2_numbers = stored(fixture.w2_weight)
    numbers = replace(fixture, w13_weight=w13_numbers, w2_weight=w2_numbers)
    bundle, weights = deep_gemm("fp8_block"), HopperWeights(w13, w2)
    experts = HopperExperts(bundle, weights, kernels, expert_map, max_pass_rows=max_pass_rows)
    return experts, numbers


def tokens_of(fixture: Fixture) -> RoutedTokens:
    return RoutedTokens(fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)


def expected(fixture: Fixture) -> Tensor:
    return Case.expected(Case(None, fixture, 0.0))  # type: ignore[arg-type]


@each_form
@each_alignment
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300, 2048])
def test_equals_the_oracle(form: str, alignment: int, num_tokens: int) -> None:
    experts, answer = experts_of(random_fixture(num_tokens, 1024, 512), form)
    assert rel_l2(experts(tokens_of(answer), alignment), expected(answer)) <= LIMITS[form]


@each_form
@each_alignment
def test_deepseek_v3_widths(form: str, alignment: int) -> None:
    experts, answer = experts_of(random_fixture(130, 7168, 2048), form)
    assert rel_l2(experts(tokens_of(answer), alignment), expected(answer)) <= LIMITS[form]


@each_form
def test_one_expert_takes_every_row_and_sentinels_take_none(form: str) -> None:
    experts, answer = experts_of(random_fixture(500, 1024, 512), form)
    answer.topk_ids[:300] = 5
    answer.topk_ids[400:] = -1
    answer.topk_weights[400:] = torch.nan
    output = experts(tokens_of(answer), 128)
    assert bool((output[400:] == 0).all())
    assert rel_l2(output[:400], expected(answer)[:400]) <= 1.5 * LIMITS[form]


@each_form
def test_a_share_of_the_experts(form: str) -> None:
    fixture = random_fixture(200, 1024, 512)
    held = torch.arange(3, NUM_EXPERTS, 4, device="cuda")
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32, device="cuda")
    expert_map[held] = torch.arange(len(held), dtype=torch.int32, device="cuda")
    local = replace(fixture, w13_weight=fixture.w13_weight[held], w2_weight=fixture.w2_weight[held])
    experts, answer = experts_of(local, form, expert_map)
    whole13, whole2 = (torch.zeros_like(w) for w in (fixture.w13_weight, fixture.w2_weight))
    whole13, whole2 = whole13.float(), whole2.float()
    whole13[held], whole2[held] = answer.w13_weight.float(), answer.w2_weight.float()
    wanted = expected(replace(fixture, w13_weight=whole13, w2_weight=whole2))
    assert rel_l2(experts(tokens_of(fixture), 64), wanted) <= LIMITS[form]


@each_form
@each_alignment
def test_passes_share_one_block(form: str, alignment: int) -> None:
    experts, answer = experts_of(random_fixture(900, 1024, 512), form, max_pass_rows=256)
    tokens = tokens_of(answer)
    assert rel_l2(experts(tokens, alignment), expected(answer)) <= LIMITS[form]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    output = experts(tokens, alignment)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - held - output.nbytes
    block = experts.workspace_bytes(900, tokens.topk_ids.shape[1], alignment)
    # Beside the block: where each pair's row is, and where each expert's rows end.
    assert block <= taken <= block + 2**20
    assert block < experts_of(answer, form)[0].workspace_bytes(900, 8, alignment)


@each_form
@each_alignment
@pytest.mark.parametrize("num_tokens", [16, 600])
def test_graph_replay_follows_new_routing_bit_for_bit(
    form: str, alignment: int, num_tokens: int
) -> None:
    experts, answer = experts_of(random_fixture(num_tokens, 1024, 512), form)
    tokens = tokens_of(answer)
    experts(tokens, alignment)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(tokens, alignment)
    for _ in range(2):
        fresh = random_fixture(num_tokens, 1024, 512)
        tokens.hidden_states.copy_(fresh.hidden_states)
        tokens.topk_ids.copy_(fresh.topk_ids)
        tokens.topk_weights.copy_(fresh.topk_weights)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, experts(tokens, alignment))
        assert rel_l2(captured, expected(answer)) <= LIMITS[form]
