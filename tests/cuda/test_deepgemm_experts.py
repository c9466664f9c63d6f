"""The DeepGEMM experts on the real library and GPU, against the fp64 oracle.

Needs `deep_gemm` (or vLLM with its copy) and a CUDA toolkit; the first call compiles kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from oracle import Fixture, rel_l2
from torch import Tensor

from vllm_moe_ep.deepgemm.expert_gemms import Bf16Gemms, Fp8Fp4Gemms, QuantisedFormat
from vllm_moe_ep.deepgemm.experts import DeepGemmExperts, gated_silu
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128, FP8_128X128_UE8M0, QuantFormat
from vllm_moe_ep.stages import RoutedTokens

NUM_EXPERTS, TOP_K = 32, 8
LIMITS = {"bf16": 1e-2, "fp8": 0.06}


@dataclass(frozen=True)
class Case:
    """Experts on the GPU and the fp64 answer to their inputs."""

    experts: DeepGemmExperts
    fixture: Fixture
    limit: float

    def tokens(self) -> RoutedTokens:
        return RoutedTokens(
            self.fixture.hidden_states, self.fixture.topk_ids, self.fixture.topk_weights
        )

    def expected(self) -> Tensor:
        """fp64, expert by expert on the GPU."""
        fixture = self.fixture
        rows = fixture.hidden_states.double()
        output = torch.zeros_like(rows)
        for expert in range(NUM_EXPERTS):
            hits = fixture.topk_ids == expert
            weight = torch.where(hits, fixture.topk_weights, 0.0).sum(dim=1).double()
            routed = hits.any(dim=1)
            gate_up = rows[routed] @ fixture.w13_weight[expert].double().T
            gate, up = gate_up.chunk(2, dim=1)
            inner = gate * torch.sigmoid(gate) * up
            values = inner @ fixture.w2_weight[expert].double().T
            output[routed] += weight[routed, None] * values
        return output

    def assert_right(self) -> Tensor:
        values = self.experts(self.tokens()).values
        assert rel_l2(values, self.expected()) <= self.limit
        return values


def random_fixture(num_tokens: int, hidden_size: int, width: int) -> Fixture:
    scores, ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(TOP_K, dim=1)
    w13 = torch.randn(NUM_EXPERTS, 2 * width, hidden_size, device="cuda") / hidden_size**0.5
    w2 = torch.randn(NUM_EXPERTS, hidden_size, width, device="cuda") / width**0.5
    return Fixture(
        torch.randn(num_tokens, hidden_size, device="cuda").bfloat16(),
        ids.to(torch.int32),
        scores / scores.sum(dim=1, keepdim=True),
        w13.bfloat16(),
        w2.bfloat16(),
    )


def bf16_case(fixture: Fixture, is_transposed: bool = False) -> Case:
    w13, w2 = fixture.w13_weight, fixture.w2_weight
    if is_transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    gemms = Bf16Gemms(deep_gemm("bf16"), w13, w2, is_transposed)
    return Case(DeepGemmExperts(gemms, gated_silu()), fixture, LIMITS["bf16"])


def _stored(name: str, weight: Tensor, fmt: QuantFormat) -> tuple[ScaledWeight, Tensor]:
    quantised = quantise(weight.float(), fmt)
    major = torch.cuda.get_device_capability()[0]
    prepared = prepare_fp8_weight(name, quantised.values, quantised.scale, fmt.block_size, major)
    return prepared, dequantise(quantised)


def fp8_case(fixture: Fixture, fmt: QuantFormat) -> Case:
    w13, w13_numbers = _stored("w13", fixture.w13_weight, fmt)
    w2, w2_numbers = _stored("w2", fixture.w2_weight, fmt)
    gemms = Fp8Fp4Gemms(deep_gemm("fp8_block"), w13, w2, QuantisedFormat("fp8", fmt.scale_fmt))
    stored = replace(fixture, w13_weight=w13_numbers, w2_weight=w2_numbers)
    return Case(DeepGemmExperts(gemms, gated_silu()), stored, LIMITS["fp8"])


FORMATS: dict[str, Callable[[Fixture], Case]] = {
    "bf16-nt": bf16_case,
    "bf16-nn": lambda fixture: bf16_case(fixture, is_transposed=True),
    "fp8-ue8m0": lambda fixture: fp8_case(fixture, FP8_128X128_UE8M0),
}
if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
    FORMATS["fp8-float32"] = lambda fixture: fp8_case(fixture, FP8_128X128)

formats = pytest.mark.parametrize("make_case", FORMATS.values(), ids=FORMATS.keys())


@formats
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300, 2048])
def test_equals_the_oracle(make_case: Callable[[Fixture], Case], num_tokens: int) -> None:
    make_case(random_fixture(num_tokens, 1024, 512)).assert_right()


@formats
def test_deepseek_v3_widths(make_case: Callable[[Fixture], Case]) -> None:
    make_case(random_fixture(33, 7168, 2048)).assert_right()


@formats
def test_ids_without_an_expert_one_expert_and_repeats(
    make_case: Callable[[Fixture], Case],
) -> None:
    fixture = random_fixture(200, 1024, 512)
    fixture.topk_ids[:64] = -1
    fixture.topk_ids[64:128] = NUM_EXPERTS
    fixture.topk_weights[:128] = torch.nan
    fixture.topk_ids[128:160] = 5
    values = (
        make_case(fixture)
        .experts(RoutedTokens(fixture.hidden_states, fixture.topk_ids, fixture.topk_weights))
        .values
    )
    assert torch.equal(values[:128], torch.zeros_like(values[:128]))
    case = make_case(fixture)
    assert rel_l2(values[128:], case.expected()[128:]) <= case.limit


@formats
def test_nan_row_stays_alone(make_case: Callable[[Fixture], Case]) -> None:
    case = make_case(random_fixture(100, 1024, 512))
    clean = case.assert_right()
    case.fixture.hidden_states[17] = torch.nan
    dirty = case.experts(case.tokens()).values
    others = torch.arange(100, device="cuda") != 17
    assert torch.equal(dirty[others], clean[others])
    assert bool(dirty[17].isnan().all())


@formats
@pytest.mark.parametrize("num_tokens", [1, 16, 300])
def test_graph_replay_follows_new_routing_bit_for_bit(
    make_case: Callable[[Fixture], Case], num_tokens: int
) -> None:
    case = make_case(random_fixture(num_tokens, 1024, 512))
    tokens = case.tokens()
    case.experts(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.experts(tokens).values
    for _ in range(2):
        fresh = random_fixture(num_tokens, 1024, 512)
        tokens.hidden_states.copy_(fresh.hidden_states)
        tokens.topk_ids.copy_(fresh.topk_ids)
        tokens.topk_weights.copy_(fresh.topk_weights)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, case.experts(tokens).values)
        assert rel_l2(captured, case.expected()) <= case.limit
