"""Single numbers: every code of each format, ties and the edges."""

import math

import pytest
import torch
from quant_oracle import E2M1, E4M3, E8M0
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import decode_e8m0, decode_fp4, decode_payload
from vllm_moe_ep_kernels.reference.quantise import (
    encode_fp4,
    encode_fp8,
    power_of_two,
    round_up_exponent,
)

BYTES = torch.arange(256, dtype=torch.uint8)


def _assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal numbers with equal signs of zero, NaN where NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(actual.double()[known], expected.double()[known])
    assert torch.equal(torch.signbit(actual)[known], torch.signbit(expected)[known])


def test_every_e4m3_code() -> None:
    numbers = decode_payload(BYTES.view(torch.float8_e4m3fn))
    _assert_same(numbers, E4M3)
    again = encode_fp8(numbers, 448.0).view(torch.uint8)
    assert torch.equal(again, BYTES)


def test_e4m3_codes_up_to_240_are_those_of_the_ieee_style_format() -> None:
    """Exponent field 15 stays unused, so that its infinities and NaN cannot appear."""
    numbers = torch.cat([torch.linspace(-300, 300, 4001), E4M3[~E4M3.isnan()].float()])
    codes = encode_fp8(numbers, 240.0).view(torch.uint8)
    assert ((codes >> 3) & 0xF).max() == 14
    within = numbers.abs() <= 240
    assert torch.equal(codes[within], encode_fp8(numbers, 448.0).view(torch.uint8)[within])
    assert set(E4M3[codes[~within].long()].tolist()) == {-240.0, 240.0}


def test_every_fp4_byte() -> None:
    packed = BYTES[:, None]
    numbers = decode_fp4(packed)
    _assert_same(numbers, torch.stack([E2M1[BYTES.long() % 16], E2M1[BYTES.long() // 16]], dim=1))
    assert torch.equal(encode_fp4(numbers), packed)


def test_fp4_low_nibble_is_the_even_element() -> None:
    assert decode_fp4(torch.tensor([[0x21, 0xF8]], dtype=torch.uint8)).tolist() == [
        [0.5, 1.0, -0.0, -6.0]
    ]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("codes", [E2M1[:8], E4M3[:127]], ids=["fp4", "fp8"])
def test_ties_go_to_the_even_code(codes: Tensor, sign: float) -> None:
    """Halfway between two codes; the fp32 numbers next to that go to the nearer code."""
    low = torch.arange(len(codes) - 1)
    middle = ((codes[:-1] + codes[1:]) / 2).float()
    even = torch.where(low % 2 == 0, low, low + 1)
    infinity, zero = torch.full_like(middle, math.inf), torch.zeros_like(middle)
    cases = [
        (middle, even),
        (torch.nextafter(middle, zero), low),
        (torch.nextafter(middle, infinity), low + 1),
    ]
    for numbers, expected in cases:
        if len(codes) == 8:
            actual = decode_fp4(encode_fp4(torch.stack([sign * numbers] * 2, dim=1)))[:, 0]
        else:
            actual = decode_payload(encode_fp8(sign * numbers, 448.0))
        _assert_same(actual, sign * codes[expected])


def test_beyond_the_largest_number() -> None:
    numbers = torch.tensor([[449.0, 1e30, -math.inf, math.inf, -500.0, 6.01]])
    assert decode_payload(encode_fp8(numbers, 448.0)).tolist() == [
        [448.0, 448.0, -448.0, 448.0, -448.0, 6.0]
    ]
    assert decode_fp4(encode_fp4(numbers)).tolist() == [[6.0, 6.0, -6.0, 6.0, -6.0, 6.0]]
    assert decode_payload(encode_fp8(torch.tensor([math.nan]), 448.0)).isnan().all()


def test_every_e8m0_byte() -> None:
    _assert_same(decode_e8m0(BYTES), E8M0)
    assert decode_e8m0(BYTES)[127] == 1.0
    assert decode_e8m0(BYTES)[0].item() == 2.0**-127
    _assert_same(decode_e8m0(BYTES), BYTES.view(torch.float8_e8m0fnu).to(torch.float32))


def test_powers_of_two_keep_their_byte() -> None:
    exponents = torch.arange(1, 255, dtype=torch.int32)
    numbers = power_of_two(exponents)
    assert torch.equal(numbers.double(), E8M0[1:255])
    assert torch.equal(round_up_exponent(numbers), exponents)
    above = torch.nextafter(numbers, torch.full_like(numbers, math.inf))
    assert torch.equal(round_up_exponent(above), exponents + 1)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(0.003, 2.0**-8), (1.5, 2.0), (1.0, 1.0), (0.0, 2.0**-126), (1e-42, 2.0**-126)],
)
def test_round_up(scale: float, expected: float) -> None:
    assert power_of_two(round_up_exponent(torch.tensor([scale]))).tolist() == [expected]


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_scales_without_a_power_of_two_are_nan(scale: float) -> None:
    exponent = round_up_exponent(torch.tensor([scale]))
    assert exponent.tolist() == [255]
    assert power_of_two(exponent).isnan().all()
