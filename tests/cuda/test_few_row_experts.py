"""Whole few-row steps by the table on the GPU, their buffers poisoned, against the fp32 answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vllm_moe_ep.bench.answer import ERROR_LIMITS, expected
from vllm_moe_ep.bench.inputs import random_tokens, random_weights
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.stages import RoutedTokens

NUM_EXPERTS, TOP_K = 32, 8
SMALL = LayerShape(NUM_EXPERTS, TOP_K, 1024, 512)
DEEPSEEK_V3 = LayerShape(NUM_EXPERTS, TOP_K, 7168, 2048)
DEVICE, PACKAGE = torch.device("cuda"), "triton_kernels"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a Hopper GPU",
)
each_form = pytest.mark.parametrize("form", ["bf16", "fp8"])


@contextmanager
def poison() -> Iterator[None]:
    """New buffers hold NaN, and integers their largest number."""
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = was


def run(experts: FewRowExperts, tokens: RoutedTokens) -> Tensor:
    with torch.inference_mode(), poison():
        return experts(tokens)


def experts_on(weights: HopperWeights, expert_map: Tensor | None = None) -> FewRowExperts:
    return FewRowExperts(weights, load_few_row_kernels(PACKAGE), NUM_EXPERTS, expert_map)


def step_of(shape: LayerShape, num_tokens: int, routing: str = "uniform") -> RoutedTokens:
    return random_tokens(shape, num_tokens, routing, torch.bfloat16, DEVICE)


def assert_right(form: str, actual: Tensor, weights: HopperWeights, tokens: RoutedTokens) -> None:
    is_known = (tokens.topk_ids >= 0) & (tokens.topk_ids < NUM_EXPERTS)
    known = RoutedTokens(
        tokens.hidden_states,
        torch.where(is_known, tokens.topk_ids, 0),
        torch.where(is_known, tokens.topk_weights, 0.0),
    )
    wanted = expected(weights, known)
    error = (actual.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert float(error) <= ERROR_LIMITS[form]


def with_unknown_ids(tokens: RoutedTokens) -> RoutedTokens:
    """Some ids are -1 or beyond the last expert, with weights of NaN; one row has no other."""
    is_lost = torch.rand(tokens.topk_ids.shape, device=DEVICE) < 0.3
    is_lost[len(is_lost) // 2] = True
    unknown = torch.where(torch.rand(is_lost.shape, device=DEVICE) < 0.5, -1, NUM_EXPERTS + 3)
    ids = torch.where(is_lost, unknown.to(torch.int32), tokens.topk_ids)
    return RoutedTokens(
        tokens.hidden_states, ids, tokens.topk_weights.masked_fill(is_lost, torch.nan)
    )


@each_form
def test_every_size_equals_the_answer(form: str) -> None:
    weights = random_weights(SMALL, form, DEVICE)
    experts = experts_on(weights)
    for num_tokens in (*range(1, 41), *range(41, 301, 7), 511, 512):
        tokens = step_of(SMALL, num_tokens)
        assert_right(form, run(experts, tokens), weights, tokens)
        lost = with_unknown_ids(tokens)
        output = run(experts, lost)
        assert_right(form, output, weights, lost)
        assert bool((output[num_tokens // 2] == 0).all())


@each_form
def test_deepseek_v3_widths(form: str) -> None:
    weights = random_weights(DEEPSEEK_V3, form, DEVICE)
    experts = experts_on(weights)
    for num_tokens in (1, 2, 3, 8, 17, 33, 130, 512):
        for routing in ("uniform", "skewed"):
            tokens = step_of(DEEPSEEK_V3, num_tokens, routing)
            assert_right(form, run(experts, tokens), weights, tokens)


@each_form
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 130, 512])
def test_all_rows_to_the_same_experts(form: str, num_tokens: int) -> None:
    weights = random_weights(SMALL, form, DEVICE)
    tokens = step_of(SMALL, num_tokens, "one-expert")
    assert_right(form, run(experts_on(weights), tokens), weights, tokens)


@each_form
@pytest.mark.parametrize("num_tokens", [5, 33, 130, 512])
def test_a_row_s_bits_depend_on_no_other_row(form: str, num_tokens: int) -> None:
    experts = experts_on(random_weights(SMALL, form, DEVICE))
    tokens = step_of(SMALL, num_tokens)
    clean = run(experts, tokens)
    order = torch.randperm(num_tokens, device=DEVICE)
    moved = RoutedTokens(
        tokens.hidden_states[order], tokens.topk_ids[order], tokens.topk_weights[order]
    )
    assert torch.equal(run(experts, moved), clean[order])
    rows = tokens.hidden_states.clone()
    rows[num_tokens // 2] = torch.nan
    dirty = run(experts, replace(tokens, hidden_states=rows))
    is_other = torch.arange(num_tokens, device=DEVICE) != num_tokens // 2
    assert torch.equal(dirty[is_other], clean[is_other])
    assert bool(dirty[num_tokens // 2].isnan().all())


@each_form
@pytest.mark.parametrize("num_tokens", [1, 20, 200])
def test_a_share_of_the_experts(form: str, num_tokens: int) -> None:
    weights = random_weights(SMALL, form, DEVICE)
    held = torch.arange(3, NUM_EXPERTS, 4, device=DEVICE)
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    expert_map[held] = torch.arange(len(held), dtype=torch.int32, device=DEVICE)
    share = HopperWeights(part_of(weights.w13, held), part_of(weights.w2, held))
    tokens = step_of(SMALL, num_tokens)
    tokens.topk_ids[0] = torch.tensor([3, 0, 1, 2, 4, 5, 6, 8], device=DEVICE)
    is_held = torch.isin(tokens.topk_ids, held.to(torch.int32))
    seen = replace(tokens, topk_ids=torch.where(is_held, tokens.topk_ids, -1))
    assert_right(form, run(experts_on(share, expert_map), tokens), weights, seen)


def part_of(weight: Tensor | ScaledWeight, held: Tensor) -> Tensor | ScaledWeight:
    if isinstance(weight, Tensor):
        return weight[held].contiguous()
    values, scale = weight.values[held].contiguous(), weight.scale[held].contiguous()
    return replace(weight, values=values, scale=scale)


@each_form
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 300])
def test_graph_replay_follows_new_routing_bit_for_bit(form: str, num_tokens: int) -> None:
    weights = random_weights(SMALL, form, DEVICE)
    experts = experts_on(weights)
    tokens = step_of(SMALL, num_tokens)
    experts(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(tokens)
    for routing in ("uniform", "skewed", "one-expert"):
        fresh = step_of(SMALL, num_tokens, routing)
        tokens.hidden_states.copy_(fresh.hidden_states)
        tokens.topk_ids.copy_(fresh.topk_ids)
        tokens.topk_weights.copy_(fresh.topk_weights)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, experts(tokens))
        assert_right(form, captured, weights, tokens)
