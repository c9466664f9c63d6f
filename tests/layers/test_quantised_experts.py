"""Quantised experts in every strategy against fp64 on the same numbers."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_factory import STRATEGIES, config_of, tokens_of
from oracle import Fixture, rel_l2
from quantised_factory import (
    ACTIVATIONS,
    WEIGHTS,
    QuantisedFixture,
    cast_of,
    experts_of,
    make_quantised,
    quantised_shard,
)
from torch import Tensor

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.quantised_experts import BlockFp8Experts, Fp4Experts
from vllm_moe_ep.layers.strategy_experts import run_experts
from vllm_moe_ep.quant.formats import FORMATS, FP4_1X32, FP8_128X128, QuantFormat
from vllm_moe_ep_kernels.host import block_linear as host_block_linear

EP_CONFIG = EPConfig(expert_capacity=64)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)
each_activation = pytest.mark.parametrize(
    "activation", ACTIVATIONS, ids=lambda fmt: fmt.name if fmt else "as-they-are"
)


def _run(strategy: str, fixture: Fixture, shard: ExpertShard) -> Tensor:
    output = run_experts(strategy, tokens_of(fixture), shard, EP_CONFIG)
    assert output.overflow is None or output.overflow.tolist() == [0]
    return output.values


def _assert_close(actual: Tensor, expected: Tensor, fmt: QuantFormat) -> None:
    error = rel_l2(actual, expected)
    assert error <= fmt.output_limit, f"rel-L2 {error:.3g} exceeds {fmt.output_limit}"


@each_strategy
@each_format
@each_activation
@pytest.mark.parametrize("num_tokens", [1, 24])
def test_sum_over_ranks(
    strategy: str, fmt: QuantFormat, activation: QuantFormat | None, num_tokens: int
) -> None:
    fixture = make_quantised(fmt, num_tokens)
    shards = [quantised_shard(fixture, 2, rank, activation=activation) for rank in range(2)]
    first, second = (_run(strategy, fixture.floats, shard) for shard in shards)
    expected = fixture.floats.routed(cast=cast_of(activation))
    _assert_close(first + second, expected, fmt)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_hidden_dtypes_are_exact(fmt: QuantFormat, dtype: torch.dtype) -> None:
    fixture = make_quantised(fmt, 9, dtype)
    actual = _run("ragged", fixture.floats, quantised_shard(fixture))
    assert rel_l2(actual, fixture.floats.routed()) <= 1e-5


@each_activation
@pytest.mark.parametrize("limit", [0.05, 0.7])
def test_clamp(activation: QuantFormat | None, limit: float) -> None:
    fixture = make_quantised(FP4_1X32, 9)
    actual = _run("dense", fixture.floats, quantised_shard(fixture, 1, 0, limit, activation))
    _assert_close(actual, fixture.floats.routed(limit, cast_of(activation)), FP4_1X32)


@each_strategy
@pytest.mark.parametrize("name", ["fp8_128x128", "fp8_1x32", "fp4_1x32"])
@settings(max_examples=8, deadline=None)
@given(
    half_hidden=st.integers(1, 150),
    half_width=st.integers(1, 150),
    num_tokens=st.integers(0, 6),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**31),
)
def test_ragged_blocks(
    strategy: str,
    name: str,
    half_hidden: int,
    half_width: int,
    num_tokens: int,
    activation: QuantFormat | None,
    seed: int,
) -> None:
    """Sizes that are no multiple of a block: gate and up each end in a short one."""
    torch.manual_seed(seed)
    fmt = FORMATS[name]
    fixture = make_quantised(fmt, num_tokens, torch.float32, 2 * half_hidden, 2 * half_width, 4)
    actual = _run(strategy, fixture.floats, quantised_shard(fixture, activation=activation))
    _assert_close(actual, fixture.floats.routed(cast=cast_of(activation)), fmt)


def test_a_width_of_576_has_five_scale_rows_a_half() -> None:
    fixture = make_quantised(FP8_128X128, 3, moe_intermediate_size=576, num_experts=4)
    assert fixture.w13.scale.shape == (4, 10, 2)
    actual = _run("ragged", fixture.floats, quantised_shard(fixture))
    _assert_close(actual, fixture.floats.routed(), FP8_128X128)


@pytest.mark.parametrize("name", ["fp8_128x128_ue8m0", "fp4_1x32"])
def test_scales_as_e8m0_numbers(name: str) -> None:
    fixture = make_quantised(FORMATS[name], 5)
    expected = _run("ragged", fixture.floats, quantised_shard(fixture))
    w13, w2 = (
        replace(matrix, scale=matrix.scale.view(torch.float8_e8m0fnu))
        for matrix in (fixture.w13, fixture.w2)
    )
    same = replace(fixture, w13=w13, w2=w2)
    assert torch.equal(_run("ragged", same.floats, quantised_shard(same)), expected)


def _poison(fixture: QuantisedFixture, part: str, kind: str) -> None:
    """Spoil expert 15, to which no row is routed."""
    matrix = getattr(fixture, part)
    is_bytes = matrix.scale.dtype is torch.uint8
    scales = {
        "nan": 255 if is_bytes else torch.nan,
        "zero": 0,
        "tiny": 0 if is_bytes else 1e-42,
        "inf": 254 if is_bytes else torch.inf,
    }
    if kind == "nan codes":
        matrix.values.view(torch.uint8)[15] = 0x7F
    else:
        matrix.scale[15] = scales[kind]


@each_strategy
@each_format
@pytest.mark.parametrize("part", ["w13", "w2"])
@pytest.mark.parametrize("kind", ["nan", "inf", "zero", "tiny", "nan codes"])
def test_an_unused_expert_cannot_leak(
    strategy: str, fmt: QuantFormat, part: str, kind: str
) -> None:
    fixture = make_quantised(fmt, 8)
    fixture.floats.topk_ids[fixture.floats.topk_ids == 15] = -1
    clean = _run(strategy, fixture.floats, quantised_shard(fixture))
    _poison(fixture, part, kind)
    actual = _run(strategy, fixture.floats, quantised_shard(fixture))
    assert torch.equal(actual, clean)
    assert actual.isfinite().all()


@each_strategy
@each_activation
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_stays_alone(
    strategy: str, activation: QuantFormat | None, poison: float
) -> None:
    fixture = make_quantised(FP8_128X128, 8)
    shard = quantised_shard(fixture, activation=activation)
    clean = _run(strategy, fixture.floats, shard)
    fixture.floats.hidden_states[1] = poison
    actual = _run(strategy, fixture.floats, shard)
    assert actual[1].isnan().all()
    others = torch.arange(8) != 1
    assert torch.equal(actual[others], clean[others])


@each_format
def test_gated_reads_routed_experts_alone(
    fmt: QuantFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = make_quantised(fmt, 3)
    fixture.floats.topk_ids[:] = torch.tensor([2, 7, 7, -1])
    read = []
    dequantise = host_block_linear.dequantise

    def recording(values: Tensor, *arguments: Any) -> Tensor:
        read.append(values.data_ptr())
        return dequantise(values, *arguments)

    monkeypatch.setattr(host_block_linear, "dequantise", recording)
    shard = quantised_shard(fixture)
    experts = shard.linears
    assert isinstance(experts, BlockFp8Experts | Fp4Experts)
    actual = _run("gated", fixture.floats, shard)
    _assert_close(actual, fixture.floats.routed(), fmt)
    weights = experts.w13.values, experts.w2.values
    assert read == [weight[slot].data_ptr() for slot in (2, 7) for weight in weights]


@each_strategy
@each_format
@each_activation
def test_no_more_than_one_expert_is_dequantised_at_a_time(
    strategy: str,
    fmt: QuantFormat,
    activation: QuantFormat | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All dequantised weights alive at any moment, together, against one expert's w13."""
    fixture = make_quantised(fmt, 2, hidden_size=1024, moe_intermediate_size=256, num_experts=4)
    tiles: list[weakref.ref[Tensor]] = []
    alive = []
    dequantise = host_block_linear.dequantise

    def recording(*arguments: Any) -> Tensor:
        tile = dequantise(*arguments)
        tiles.append(weakref.ref(tile))
        alive.append(sum(other.numel() for ref in tiles if (other := ref()) is not None))
        return tile

    monkeypatch.setattr(host_block_linear, "dequantise", recording)
    _run(strategy, fixture.floats, quantised_shard(fixture, activation=activation))
    assert 0 < max(alive) <= 2 * 256 * 1024
    assert all(ref() is None for ref in tiles)


def test_weights_are_held_by_reference() -> None:
    """New weights in the same memory, as after a reload, are seen at once."""
    fixture, newer = make_quantised(FP8_128X128, 5), make_quantised(FP8_128X128, 5)
    linears = BlockFp8Experts(**_arguments(fixture))
    rows = newer.floats.hidden_states
    before = linears.gate_up(3, rows)
    for old, new in ((fixture.w13, newer.w13), (fixture.w2, newer.w2)):
        old.values.copy_(new.values)
        old.scale.copy_(new.scale)
    after = linears.gate_up(3, rows)
    assert torch.equal(after, experts_of(newer, [3]).gate_up(0, rows))
    assert not torch.equal(before, after)


def _arguments(fixture: QuantisedFixture) -> dict[str, Any]:
    return {
        "w13_weight": fixture.w13.values,
        "w13_scale": fixture.w13.scale,
        "w2_weight": fixture.w2.values,
        "w2_scale": fixture.w2.scale,
        "config": config_of(fixture.floats),
    }


BYTES = torch.zeros(8, 256, 256, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fmt", "changed", "error", "message"),
    [
        (FP8_128X128, {"block_size": (64, 64)}, UnsupportedError, "128x128, found 64x64"),
        (FP8_128X128, {"activation": FP8_128X128}, UnsupportedError, "found the format fp8_128"),
        (FP8_128X128, {"activation": FP4_1X32}, UnsupportedError, "found the format fp4_1x32"),
        (FP8_128X128, {"hidden_dtype": torch.int8}, UnsupportedError, r"found torch\.int8"),
        (FP8_128X128, {"w2_weight": torch.ones(1)}, UnsupportedError, r"w2_weight torch\.float32"),
        (FP8_128X128, {"w13_scale": torch.ones(16, 3, 2)}, ValueError, r"2\], found \[16, 3, 2\]"),
        (FP8_128X128, {"w2_scale": torch.ones(15, 2, 1)}, ValueError, r"1\], found \[15, 2, 1\]"),
        (FP4_1X32, {"w13_scale": torch.ones(1)}, UnsupportedError, r"w13_scale is torch\.float32"),
        (FP4_1X32, {"w13_weight": BYTES}, ValueError, r"256, 128\], found \[8, 256, 256\]"),
        (FP4_1X32, {"w13_weight": BYTES[..., :128]}, ValueError, "8 experts and w2_weight 16"),
    ],
)
def test_what_does_not_fit_is_refused(
    fmt: QuantFormat, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = _arguments(make_quantised(fmt, 1)) | changed
    with pytest.raises(error, match=message):
        (Fp4Experts if fmt is FP4_1X32 else BlockFp8Experts)(**arguments)
