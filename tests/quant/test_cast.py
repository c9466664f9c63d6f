"""Whole tensors in every format, bit for bit against the definitions."""

import math

import pytest
import quant_oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import rel_l2
from torch import Tensor

from vllm_moe_ep.quant.cast import dequantise, quantise, quantise_dequantise
from vllm_moe_ep.quant.formats import FORMATS, FP4_1X32, FP8_128X128, QuantFormat
from vllm_moe_ep.quant.weight import Quantised

ALL = [*FORMATS.values()]
ALL += [known.with_max(240.0) for known in ALL if known.max_value == 448.0]
each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)


def _blocks(fmt: QuantFormat) -> quant_oracle.Blocks:
    return quant_oracle.Blocks(*fmt.block_size, fmt.max_value, fmt.is_power_of_two, fmt.is_fp4)


def _assert_exact(values: Tensor, fmt: QuantFormat) -> None:
    """Kept numbers, and dequantising itself, equal the oracle's to the last bit of fp32."""
    quantised = quantise(values, fmt)
    kept = dequantise(quantised)
    parts = quantised.values, quantised.scale
    assert torch.equal(kept, quant_oracle.dequantise(*parts, *fmt.block_size).float())
    assert torch.equal(kept, quant_oracle.quantise_dequantise(values, _blocks(fmt)).float())


def test_names_are_unique() -> None:
    assert len({fmt.name for fmt in ALL}) == len(ALL)


@each_format
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (9, 130), (130, 200), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_numbers(fmt: QuantFormat, shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = (torch.randn(shape) * torch.exp(2 * torch.randn(shape[0], 1))).to(dtype)
    _assert_exact(values, fmt)


@each_format
@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(1, 20),
    half_k=st.integers(1, 80),
    exponent=st.integers(-149, 110),
    spread=st.integers(0, 30),
    seed=st.integers(0, 2**31),
)
def test_any_magnitude(
    fmt: QuantFormat, num_rows: int, half_k: int, exponent: int, spread: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = (num_rows, 2 * half_k)
    powers = exponent + spread * torch.rand(shape, generator=random, dtype=torch.float64)
    values = torch.randn(shape, generator=random, dtype=torch.float64) * torch.exp2(powers)
    values = values.clamp(-3e38, 3e38).float()
    _assert_exact(values, fmt)
    scale = dequantise(Quantised(*_ones_like_payload(values, fmt), fmt.block_size))
    assert (values.abs() <= scale * fmt.max_value * (1 + 2.0**-22)).all()


def _ones_like_payload(values: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """A payload of ones under the scales of ``values``."""
    quantised = quantise(values, fmt)
    if fmt.is_fp4:
        return torch.full_like(quantised.values, 0x22), quantised.scale
    return torch.ones(values.shape).to(fmt.dtype), quantised.scale


@each_format
def test_round_trip_error(fmt: QuantFormat) -> None:
    values = torch.randn(256, 512)
    assert rel_l2(quantise_dequantise(values, fmt), values) <= fmt.round_trip_limit


@each_format
def test_rounding_has_no_bias(fmt: QuantFormat) -> None:
    """Numbers spread evenly over whole rounding cells of equal width, many of them ties.

    Rounding ties up, or away from zero, would be off by half a cell or more on average here.
    """
    cell, lowest, num_cells = (1.0, 2.5, 1) if fmt.is_fp4 else (8.0, 68.0, 7)
    values = lowest + cell / 4 * torch.randint(0, 4 * num_cells + 1, (512, 512))
    # A scale of exactly 1 in each block.
    values[:: fmt.block_size[0], :: fmt.block_size[1]] = fmt.max_value
    error = (quantise_dequantise(values, fmt) - values).double() / cell
    assert error.std() > 0.2
    assert error.mean().abs() <= 6 * error.std() / math.sqrt(error.numel())


@each_format
def test_kept_numbers_are_kept_again(fmt: QuantFormat) -> None:
    """Codes under scales that are given again survive; power-of-two scales are found again."""
    kept = quantise_dequantise(torch.randn(128, 256), fmt)
    again = quantise_dequantise(kept, fmt)
    if fmt.is_power_of_two:
        assert torch.equal(again, kept)
    else:
        assert rel_l2(again, kept) <= 1e-6


@each_format
def test_zero_blocks(fmt: QuantFormat) -> None:
    values = torch.zeros(256, 256)
    values[1, 130] = 3.0
    quantised = quantise(values, fmt)
    kept = dequantise(quantised)
    assert torch.equal(kept, quant_oracle.quantise_dequantise(values, _blocks(fmt)).float())
    assert (kept != 0).sum() == 1
    scale = quantised.scale if fmt.is_power_of_two else quantised.scale.view(torch.int32)
    assert (scale != 0).all()


@each_format
def test_denormal_numbers(fmt: QuantFormat) -> None:
    _assert_exact(torch.randint(-100, 100, (4, 128)) * 2.0**-149, fmt)


@each_format
def test_largest_numbers(fmt: QuantFormat) -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([[largest, -largest, 1e38, 1.0] * 32])
    quantised = quantise(values, fmt)
    parts = quantised.values, quantised.scale
    kept = quant_oracle.dequantise(*parts, *fmt.block_size)
    expected = quant_oracle.quantise_dequantise(values, _blocks(fmt))
    assert torch.equal(kept, expected)
    assert rel_l2(kept, values) <= 0.15


@each_format
def test_signs_of_zero(fmt: QuantFormat) -> None:
    values = torch.tensor([[-0.0, 0.0, 1.0, -1.0] * 32])
    assert torch.equal(torch.signbit(quantise_dequantise(values, fmt)), torch.signbit(values))


@each_format
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_block_is_nan_alone(fmt: QuantFormat, poison: float) -> None:
    values = torch.randn(256, 256)
    clean = quantise_dequantise(values, fmt)
    values[130, 140] = poison
    kept = quantise_dequantise(values, fmt)
    rows = torch.arange(256)[:, None] // fmt.block_size[0] == 130 // fmt.block_size[0]
    columns = torch.arange(256)[None, :] // fmt.block_size[1] == 140 // fmt.block_size[1]
    assert kept[rows & columns].isnan().all()
    assert torch.equal(kept[~(rows & columns)], clean[~(rows & columns)])


def test_ragged_rows_have_a_scale_of_their_own() -> None:
    quantised = quantise(torch.randn(3, 576, 200), FP8_128X128)
    assert quantised.scale.shape == (3, 5, 2)
    assert dequantise(quantised).shape == (3, 576, 200)


def test_240_against_448() -> None:
    values = torch.tensor([[448.0, 241.0, 240.0, 1.0] * 32])
    narrow = FP8_128X128.with_max(240.0)
    assert quantise(values, FP8_128X128).scale.tolist() == [[1.0]]
    assert torch.equal(quantise_dequantise(values, FP8_128X128)[0, 0], values[0, 0])
    assert quantise(values, narrow).values.float().max() == 240.0
    assert math.isclose(quantise(values, narrow).scale.item(), 448 / 240, rel_tol=1e-7)
    doubled = FORMATS["fp8_128x128_ue8m0"].with_max(240.0)
    assert quantise(values, doubled).scale.tolist() == [[128]]


@each_format
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_other_results_are_rounded_once(fmt: QuantFormat, out_dtype: torch.dtype) -> None:
    quantised = quantise(torch.randn(130, 160), fmt)
    parts = quantised.values, quantised.scale
    expected = quant_oracle.dequantise(*parts, *fmt.block_size).float().to(out_dtype)
    assert torch.equal(dequantise(quantised, out_dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_scales_may_be_bytes_or_numbers(dtype: torch.dtype) -> None:
    quantised = quantise(torch.randn(256, 256), FORMATS["fp8_128x128_ue8m0"])
    same = Quantised(quantised.values, quantised.scale.view(dtype), quantised.block_size)
    assert torch.equal(dequantise(same), dequantise(quantised))


def test_an_odd_number_of_fp4_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of it; found 33"):
        quantise(torch.zeros(2, 33), FP4_1X32)
