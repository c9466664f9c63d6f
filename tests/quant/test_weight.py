"""Parts of quantised tensors, cut anywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FORMATS, FP4_1X32, FP8_128X128, QuantFormat
from vllm_moe_ep.quant.weight import Quantised

each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)


def _quantised(fmt: QuantFormat, *shape: int) -> Quantised:
    return quantise(torch.randn(shape) * torch.exp(2 * torch.randn(shape)), fmt)


@each_format
@settings(max_examples=20, deadline=None)
@given(data=st.data(), n=st.integers(1, 300), half_k=st.integers(1, 100))
def test_cuts_keep_every_number(fmt: QuantFormat, data: st.DataObject, n: int, half_k: int) -> None:
    weight = _quantised(fmt, 2, n, 2 * half_k)
    numbers = dequantise(weight)
    row, row_end = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))
    halves = sorted(data.draw(st.lists(st.integers(0, half_k), min_size=2, max_size=2)))
    column, column_end = (2 * half for half in halves)
    part = weight.rows(row, row_end).columns(column, column_end)
    assert torch.equal(dequantise(part), numbers[:, row:row_end, column:column_end])
    joined = weight.rows(row, row_end).followed_by(weight)
    assert torch.equal(dequantise(joined), torch.cat([numbers[:, row:row_end], numbers], dim=1))


@each_format
@pytest.mark.parametrize("width", [96, 128, 130, 200])
def test_halves_start_with_a_block_each(fmt: QuantFormat, width: int) -> None:
    gate, up = _quantised(fmt, 2, width, 64), _quantised(fmt, 2, width, 64)
    values = torch.cat([gate.values, up.values], dim=1)
    both = Quantised.of_halves(values, torch.cat([gate.scale, up.scale], dim=1), fmt.block_size)
    assert both.values is values
    assert torch.equal(dequantise(both), torch.cat([dequantise(gate), dequantise(up)], dim=1))


def test_a_cut_inside_a_block_shortens_the_blocks() -> None:
    weight = _quantised(FP8_128X128, 384, 384)
    aligned, inside = weight.rows(128, 256), weight.rows(192, 320)
    assert aligned.block_size == (128, 128)
    assert aligned.scale.data_ptr() == weight.scale[1].data_ptr()
    assert inside.block_size == (64, 128)
    assert torch.equal(inside.scale, weight.scale[[1, 2]])
    assert weight.columns(96, 160).block_size == (128, 32)


@each_format
def test_zeros_have_scales_of_one(fmt: QuantFormat) -> None:
    weight = _quantised(fmt, 130, 96)
    zeros = weight.zeros_like()
    assert torch.equal(dequantise(zeros), torch.zeros(130, 96))
    assert (zeros.values.shape, zeros.scale.shape) == (weight.values.shape, weight.scale.shape)
    one = 127 if fmt.is_power_of_two else 1.0
    assert torch.equal(zeros.scale, torch.full_like(zeros.scale, one))
    as_numbers = Quantised(weight.values, torch.ones(weight.scale.shape), weight.block_size)
    assert torch.equal(as_numbers.zeros_like().scale, as_numbers.scale)


def test_zeros_in_e8m0_numbers() -> None:
    weight = _quantised(FORMATS["fp8_128x128_ue8m0"], 128, 128)
    numbers = Quantised(weight.values, weight.scale.view(torch.float8_e8m0fnu), (128, 128))
    assert numbers.zeros_like().scale.view(torch.uint8).tolist() == [[127]]


FP8 = torch.zeros(4, 128, 256, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        (FP8.float(), torch.ones(4, 1, 2), "uint8 with two FP4 codes a byte; found torch.float32"),
        (FP8, torch.ones(4, 1, 2).half(), "UE8M0 bytes.*found torch.float16"),
        (FP8, torch.ones(4, 2, 2), r"need scales of shape \[4, 1, 2\], found \[4, 2, 2\]"),
        (FP8, torch.ones(3, 1, 2), r"need scales of shape \[4, 1, 2\], found \[3, 1, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(values: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantised(values, scale, (128, 128))


def test_a_cut_through_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="Columns 3 to 8 cut through a byte"):
        _quantised(FP4_1X32, 4, 64).columns(3, 8)
