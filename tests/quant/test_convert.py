"""Weights for devices whose fp8 numbers end at 240."""

import math

import pytest
import quant_oracle
import torch
from oracle import rel_l2
from torch import Tensor

from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.convert import fit_to_max
from vllm_moe_ep.quant.formats import FP4_1X32, FP8_128X128, FP8_128X128_UE8M0
from vllm_moe_ep.quant.weight import Quantised


def _exact(weight: Quantised) -> Tensor:
    return quant_oracle.dequantise(weight.values, weight.scale, *weight.block_size)


def _every_code(scale: Tensor) -> Quantised:
    """[128, 128] with all 256 bytes, one block."""
    codes = torch.arange(128 * 128).remainder(256).to(torch.uint8).view(128, 128)
    return Quantised(codes.view(torch.float8_e4m3fn), scale, (128, 128))


def test_448_changes_nothing() -> None:
    weight = _every_code(torch.tensor([[0.3]]))
    assert fit_to_max(weight, 448.0, "w13").weight is weight
    packed = quantise(torch.randn(4, 64), FP4_1X32)
    assert fit_to_max(packed, 240.0, "w13").weight is packed


def test_240_by_448_over_240() -> None:
    numbers = torch.tensor([448.0, -448.0, 300.0, 241.0, 1.0, -0.0, 0.0, 2.0] * 16).repeat(128, 1)
    weight = Quantised(numbers.to(torch.float8_e4m3fn), torch.full((1, 1), 0.01), (128, 128))
    assert weight.values.view(torch.uint8)[0, 5] == 0x80
    converted = fit_to_max(weight, 240.0, "w13").weight
    assert converted.values.float()[0, :2].tolist() == [240.0, -240.0]
    assert converted.values.view(torch.uint8)[0, 5:7].tolist() == [0x80, 0]
    assert converted.values.float().abs().max() == 240.0
    assert math.isclose(converted.scale.item(), 0.01 * 448 / 240, rel_tol=1e-6)
    assert rel_l2(_exact(converted), _exact(weight)) <= 0.04


def test_240_of_random_weights() -> None:
    numbers = torch.randn(256, 256)
    converted = fit_to_max(quantise(numbers, FP8_128X128), 240.0, "w13")
    assert rel_l2(_exact(converted.weight), numbers.double()) <= 0.04
    assert converted.num_inexact > 0


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor([[0.3]]),
        torch.tensor([[120]], dtype=torch.uint8),
        torch.tensor([[120]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    ],
    ids=["float32", "bytes", "e8m0"],
)
def test_halving_loses_odd_subnormals_alone(scale: Tensor) -> None:
    weight = _every_code(scale)
    converted = fit_to_max(weight, 240.0, "w13", halve=True)
    assert converted.weight.scale.dtype is scale.dtype
    before, after = _exact(weight), _exact(converted.weight)
    assert torch.equal(before.isnan(), after.isnan())
    changed = (before != after) & ~before.isnan()
    codes = set(weight.values.view(torch.uint8)[changed].tolist())
    assert codes == {sign | code for sign in (0, 0x80) for code in range(1, 16, 2)}
    assert converted.num_inexact == changed.sum() == 16 * 64
    finite = converted.weight.values.float().nan_to_num(0.0)
    assert finite.abs().max() == 224.0


def test_a_nan_scale_stays_nan_and_the_largest_cannot_double() -> None:
    codes = torch.tensor([[255]], dtype=torch.uint8)
    assert fit_to_max(_every_code(codes), 240.0, "w13").weight.scale.tolist() == [[255]]
    with pytest.raises(UnsupportedError, match=r"w13: .* 2\*\*127 cannot be doubled"):
        fit_to_max(_every_code(codes - 1), 240.0, "w13")


def test_other_largest_numbers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="w2: .* 448 or 240, found 57344"):
        fit_to_max(_every_code(torch.ones(1, 1)), 57344.0, "w2")


def test_converted_weights_dequantise() -> None:
    weight = fit_to_max(quantise(torch.randn(130, 140), FP8_128X128_UE8M0), 240.0, "w13").weight
    assert torch.equal(dequantise(weight).double(), _exact(weight))
