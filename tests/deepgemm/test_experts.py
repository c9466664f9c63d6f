"""The experts on kernels that follow the documented layouts, against the fp64 oracle."""

from dataclasses import replace

import pytest
import torch
from fake_kernels import fake_bundle
from oracle import Fixture, make_fixture, rel_l2
from torch import Tensor

from vllm_moe_ep.deepgemm.expert_gemms import Bf16Gemms, Fp8Fp4Gemms, QuantisedFormat
from vllm_moe_ep.deepgemm.experts import DeepGemmExperts, gated_silu, plain_silu
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp4_weight, prepare_fp8_weight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import (
    FP4_1X32,
    FP8_1X128,
    FP8_1X128_UE8M0,
    FP8_128X128,
    FP8_128X128_UE8M0,
    QuantFormat,
)
from vllm_moe_ep.stages import RoutedTokens

BF16_LIMIT = 1e-2
# Activations lose two times 2.6 % to fp8, on the way in and between the projections.
FP8_LIMIT = 0.06
majors = pytest.mark.parametrize("major", [9, 10])


def _fixture(**sizes: int) -> Fixture:
    return make_fixture(torch.bfloat16, **sizes)


def _tokens(fixture: Fixture) -> RoutedTokens:
    return RoutedTokens(fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)


def _bf16(fixture: Fixture, major: int, is_transposed: bool = False) -> Bf16Gemms:
    w13, w2 = fixture.w13_weight, fixture.w2_weight
    if is_transposed:
        w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    return Bf16Gemms(fake_bundle(major), w13, w2, is_transposed)


@majors
@pytest.mark.parametrize("is_transposed", [False, True], ids=["nt", "nn"])
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_bf16(major: int, is_transposed: bool, limit: float | None, num_tokens: int) -> None:
    fixture = _fixture(num_tokens=num_tokens)
    experts = DeepGemmExperts(_bf16(fixture, major, is_transposed), gated_silu(limit))
    output = experts(_tokens(fixture))
    assert output.overflow is None and output.values.dtype == torch.float32
    assert rel_l2(output.values, fixture.routed(limit)) <= BF16_LIMIT


@majors
def test_sentinels_leave_exact_zeros(major: int) -> None:
    fixture = _fixture()
    fixture.topk_ids[32:] = torch.tensor([-1, 16, 23, -1])
    fixture.topk_ids[3, 1] = -1
    fixture.topk_weights[32:] = torch.nan
    output = DeepGemmExperts(_bf16(fixture, major), gated_silu())(_tokens(fixture))
    assert torch.equal(output.values[32:], torch.zeros(32, 256))
    assert rel_l2(output.values, fixture.routed()) <= BF16_LIMIT


@majors
def test_nan_stays_in_its_row_and_unused_experts_do_not_matter(major: int) -> None:
    fixture = _fixture()
    fixture.topk_ids[fixture.topk_ids == 15] = 0
    fixture.w13_weight[15] = torch.nan
    fixture.w2_weight[15] = torch.inf
    experts = DeepGemmExperts(_bf16(fixture, major), gated_silu())
    clean = experts(_tokens(fixture)).values
    assert rel_l2(clean, fixture.routed()) <= BF16_LIMIT
    fixture.hidden_states[0] = torch.nan
    dirty = experts(_tokens(fixture)).values
    assert bool(dirty[0].isnan().all()) and torch.equal(dirty[1:], clean[1:])


@majors
def test_biases_and_a_plain_activation(major: int) -> None:
    num_experts, hidden_size, width = 6, 32, 24
    fixture = _fixture(num_tokens=17, hidden_size=hidden_size, num_experts=num_experts, top_k=2)
    w1 = (torch.randn(num_experts, width, hidden_size) / hidden_size**0.5).bfloat16()
    w2 = (torch.randn(num_experts, hidden_size, width) / width**0.5).bfloat16()
    b1, b2 = torch.randn(num_experts, width), torch.randn(num_experts, hidden_size)
    gemms = Bf16Gemms(fake_bundle(major), w1, w2)
    output = DeepGemmExperts(gemms, plain_silu, b1, b2)(_tokens(fixture))
    expected = torch.zeros(17, hidden_size, dtype=torch.float64)
    for token, row in enumerate(fixture.hidden_states.double()):
        for expert, weight in zip(
            fixture.topk_ids[token], fixture.topk_weights[token], strict=True
        ):
            inner = w1[expert].double() @ row + b1[expert].double()
            inner = inner * torch.sigmoid(inner)
            expected[token] += weight * (w2[expert].double() @ inner + b2[expert].double())
    assert rel_l2(output.values, expected) <= BF16_LIMIT


def _prepared(
    name: str, weight: Tensor, fmt: QuantFormat, major: int
) -> tuple[ScaledWeight, Tensor]:
    """The weight in the device's form, and the numbers it stands for."""
    quantised = quantise(weight, fmt)
    if fmt is FP4_1X32:
        prepared = prepare_fp4_weight(name, quantised.values, quantised.scale, major)
    else:
        prepared = prepare_fp8_weight(
            name, quantised.values, quantised.scale, fmt.block_size, major
        )
    return prepared, dequantise(quantised)


@pytest.mark.parametrize(
    ("major", "fmt"),
    [
        (9, FP8_128X128),
        (9, FP8_128X128_UE8M0),
        (10, FP8_128X128_UE8M0),
        (10, FP8_1X128_UE8M0),
        (10, FP4_1X32),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("sizes", [(256, 128), (384, 192)])
def test_fp8_and_fp4(major: int, fmt: QuantFormat, sizes: tuple[int, int]) -> None:
    fixture = _fixture(num_tokens=33, hidden_size=sizes[0], moe_intermediate_size=sizes[1])
    fixture.topk_ids[5] = -1
    w13, w13_numbers = _prepared("w13", fixture.w13_weight, fmt, major)
    w2, w2_numbers = _prepared("w2", fixture.w2_weight, fmt, major)
    weight_format = QuantisedFormat("fp4" if fmt is FP4_1X32 else "fp8", fmt.scale_fmt)
    gemms = Fp8Fp4Gemms(fake_bundle(major), w13, w2, weight_format)
    output = DeepGemmExperts(gemms, gated_silu())(_tokens(fixture)).values
    stored = replace(fixture, w13_weight=w13_numbers, w2_weight=w2_numbers)
    assert rel_l2(output, stored.routed()) <= FP8_LIMIT
    assert torch.equal(output[5], torch.zeros(sizes[0]))


def test_no_tokens() -> None:
    fixture = _fixture(num_tokens=0)
    output = DeepGemmExperts(_bf16(fixture, 9), gated_silu())(_tokens(fixture))
    assert output.values.shape == (0, 256) and output.values.dtype == torch.float32


def test_refusals() -> None:
    fixture = _fixture()
    with pytest.raises(UnsupportedError, match="w2_weight must be bfloat16.*float16"):
        Bf16Gemms(fake_bundle(9), fixture.w13_weight, fixture.w2_weight.half())
    with pytest.raises(ValueError, match="w13 holds 16 experts and w2 15"):
        Bf16Gemms(fake_bundle(9), fixture.w13_weight, fixture.w2_weight[1:])
    with pytest.raises(ValueError, match="w13 is on cpu and w2 on meta"):
        Bf16Gemms(fake_bundle(9), fixture.w13_weight, fixture.w2_weight.to("meta"))
    experts = DeepGemmExperts(_bf16(fixture, 9), gated_silu())
    ids, weights = fixture.topk_ids, fixture.topk_weights
    with pytest.raises(UnsupportedError, match="found torch.float16"):
        experts(RoutedTokens(fixture.hidden_states.half(), ids, weights))
    with pytest.raises(ValueError, match="hidden_states are on meta"):
        experts(RoutedTokens(fixture.hidden_states.to("meta"), ids, weights))
    w13, _ = _prepared("w13", fixture.w13_weight, FP8_128X128, 9)
    w2, _ = _prepared("w2", fixture.w2_weight, FP8_128X128, 9)
    with pytest.raises(UnsupportedError, match="activation_scheme 'static'"):
        Fp8Fp4Gemms(fake_bundle(9), w13, w2, QuantisedFormat("fp8", "float32", "static"))
    per_row, _ = _prepared("w13", fixture.w13_weight, FP8_1X128, 9)
    with pytest.raises(UnsupportedError, match="SM90 reads one weight scale per 128x128"):
        Fp8Fp4Gemms(fake_bundle(9), per_row, w2, QuantisedFormat("fp8", "float32"))
    with pytest.raises(UnsupportedError, match="no kernel for fp8 weights with float32.*SM100"):
        Fp8Fp4Gemms(fake_bundle(10), w13, w2, QuantisedFormat("fp8", "float32"))


def _gather_gemm(a: Tensor, b: Tensor, d: Tensor, layout: Tensor) -> None:
    """The product without loops, which the compiler can trace."""
    d.copy_((b[layout.clamp(min=0)] @ a[:, :, None])[:, :, 0])


def test_one_graph_for_any_number_of_tokens() -> None:
    fixture = _fixture(num_tokens=9, hidden_size=32, moe_intermediate_size=16)
    functions = {"m_grouped_bf16_gemm_nt_contiguous": _gather_gemm}
    bundle = replace(fake_bundle(9), functions=functions)
    gemms = Bf16Gemms(bundle, fixture.w13_weight, fixture.w2_weight)
    experts = DeepGemmExperts(gemms, gated_silu())
    torch._dynamo.reset()
    compiled = torch.compile(experts.__call__, fullgraph=True, dynamic=True, backend="eager")
    for num_tokens in (9, 2, 7):
        tokens = _tokens(fixture)
        parts = (tokens.hidden_states, tokens.topk_ids, tokens.topk_weights)
        tokens = RoutedTokens(*(part[:num_tokens] for part in parts))
        expected = fixture.routed()[:num_tokens]
        assert rel_l2(compiled(tokens).values, expected) <= BF16_LIMIT
