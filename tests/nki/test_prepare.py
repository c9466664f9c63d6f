"""Conversion and layout of weights at load."""

import ml_dtypes
import numpy as np
import pytest
import quant_oracle
import torch
from kernel_runner import prepare_raw
from quantised_factory import random_matrix

from vllm_moe_ep.quant.formats import FORMATS
from vllm_moe_ep_kernels.nki.convert import expand_fp4, fit_to_240, join_scales
from vllm_moe_ep_kernels.nki.prepare import panel_blocks, prepare, why_not

CODES = np.arange(256, dtype=np.uint8)
FINITE = CODES[(CODES & 0x7F) != 0x7F]


def _ocp(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _ieee(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3).astype(np.float64)


@pytest.mark.parametrize("is_ue8m0", [False, True])
def test_every_code_in_a_block_with_a_large_number(is_ue8m0: bool) -> None:
    block = np.full((1, 1, 32), 0x7E, np.uint8)
    codes = np.concatenate([block.copy() for _ in FINITE], axis=1)
    codes[0, :, 3] = FINITE
    scale = np.full((1, len(FINITE), 1), 120 if is_ue8m0 else 0.75)
    scale = scale.astype(np.uint8 if is_ue8m0 else np.float32)
    fitted, doubled, num_inexact = fit_to_240(codes, scale, (1, 32))
    before, after = _ocp(codes)[0, :, 3], 2 * _ieee(fitted)[0, :, 3]
    is_exact = before == after
    assert set(FINITE[~is_exact] & 0x7F) == {1, 3, 5, 7, 9, 11, 13, 15}
    assert num_inexact == (~is_exact).sum() == 16
    # What is not exact is off by half a step of the smaller format.
    assert np.abs(before - after).max() == 2.0**-9
    assert np.abs(_ieee(fitted)).max() <= 240
    assert (doubled == (121 if is_ue8m0 else 1.5)).all()


def test_blocks_within_240_stay_as_they_are() -> None:
    codes = FINITE[(FINITE & 0x7F) < 0x78][None, None, :224]
    scale = np.ones((1, 1, 7), np.float32)
    fitted, same, num_inexact = fit_to_240(codes, scale, (1, 32))
    assert (fitted == codes).all() and (same == 1).all() and num_inexact == 0
    np.testing.assert_array_equal(_ieee(fitted), _ocp(codes))


def test_nan_stays_nan() -> None:
    codes = np.array([[[0x7F, 0xFF, 0x7E] + [0] * 29]], np.uint8)
    fitted, _, _ = fit_to_240(codes, np.ones((1, 1, 1), np.float32), (1, 32))
    np.testing.assert_array_equal(np.isnan(_ieee(fitted)), np.isnan(_ocp(codes)))


@pytest.mark.parametrize("byte", [254, 255])
def test_scales_that_do_not_fit_are_refused(byte: int) -> None:
    scale = np.full((1, 512, 4), 120, np.uint8)
    scale[0, 7, 2] = byte
    values = np.full((1, 512, 128), 0x7E, np.uint8)
    reason = "is NaN" if byte == 255 else "is too large"
    with pytest.raises(ValueError, match=rf"scale \[0, 7, 2\] of w2_weight {reason}"):
        prepare(values, scale, (1, 32), is_fp4=False, name="w2_weight")
    with pytest.raises(ValueError, match=rf"scale \[0, 7, 2\] of w2_weight {reason}"):
        prepare(values[:, :, :64], scale, (1, 32), is_fp4=True, name="w2_weight")


@pytest.mark.parametrize("number", [3e38, np.nan, np.inf, -np.inf])
def test_fp32_scales_that_do_not_fit_are_refused(number: float) -> None:
    """A number above 240 in the block doubles its scale; without one 3e38 stays as it is."""
    scale = np.ones((2, 2, 2), np.float32)
    scale[1, 0, 1] = number
    values = np.full((2, 256, 256), 0x40, np.uint8)
    if number == 3e38:
        assert prepare(values, scale, (128, 128), is_fp4=False).scales.max() == np.float32(3e38)
        values[1, 3, 200] = 0x78
    reason = "is 3e.38, over a block" if number == 3e38 else f"is {number}, not a finite"
    with pytest.raises(ValueError, match=rf"scale \[1, 0, 1\] of w13_weight {reason}"):
        prepare(values, scale, (128, 128), is_fp4=False, name="w13_weight")


def test_fp4_scales_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="w2_weight must be UE8M0 bytes .uint8., found float32"):
        prepare(
            np.zeros((1, 512, 64), np.uint8),
            np.ones((1, 512, 4), np.float32),
            (1, 32),
            is_fp4=True,
            name="w2_weight",
        )


def test_numbers_under_the_smallest_scale_are_counted() -> None:
    scale = np.full((1, 256, 4), 120, np.uint8)
    scale[0, 7, 2] = 0
    values = np.full((1, 256, 128), 0x08, np.uint8)
    values[0, 7, 70] = 0
    assert prepare(values, scale, (1, 32), is_fp4=False).num_inexact == 31


def test_expanded_fp4_is_exact_within_13_powers_of_two() -> None:
    fmt = FORMATS["fp4_1x32"]
    matrix = random_matrix(fmt, (2,), 64, 256)
    scale = torch.randint(100, 114, (2, 64, 8), dtype=torch.uint8)
    values, wide, num_inexact = expand_fp4(matrix.values.numpy(), scale.numpy())
    numbers = (
        _ieee(values).reshape(2, 64, 2, 128) * np.exp2(wide.astype(np.float64) - 127)[..., None]
    )
    for expert in range(2):
        exact = quant_oracle.dequantise(matrix.values[expert], scale[expert], *fmt.block_size)
        np.testing.assert_array_equal(numbers[expert].reshape(64, 256), exact.numpy())
    assert num_inexact == 0


def test_expanded_fp4_counts_what_it_rounds() -> None:
    fmt = FORMATS["fp4_1x32"]
    matrix = random_matrix(fmt, (1,), 16, 128)
    scale = torch.tensor([90, 104, 100, 108], dtype=torch.uint8).expand(1, 16, 4).contiguous()
    values, wide, num_inexact = expand_fp4(matrix.values.numpy(), scale.numpy())
    numbers = _ieee(values)[0] * np.exp2(wide[0].astype(np.float64) - 127)
    exact = quant_oracle.dequantise(matrix.values[0], scale[0], *fmt.block_size).numpy()
    assert num_inexact == (numbers != exact).sum() > 0
    assert (numbers != exact)[:, 32:].sum() == 0


def test_joined_scales_change_no_number_but_those_counted() -> None:
    matrix = random_matrix(FORMATS["fp8_1x32_ue8m0"], (2,), 64, 256)
    codes = matrix.values.view(torch.uint8).numpy()
    scale = matrix.scale - torch.randint(0, 8, matrix.scale.shape, dtype=torch.uint8)
    joined, wide, num_inexact = join_scales(codes, scale.numpy())
    assert wide.shape == (2, 64, 2)
    numbers = _ocp(joined) * np.repeat(np.exp2(wide.astype(np.float64) - 127), 128, axis=-1)
    exact = quant_oracle.dequantise(matrix.values, scale, 1, 32).numpy()
    differs = numbers != exact
    assert 0 < num_inexact == differs.sum() < differs.size / 20
    # Off by at most half of the smallest step, 2**-9, under the scale that stays.
    steps = np.repeat(np.exp2(wide.astype(np.float64) - 127), 128, axis=-1) * 2.0**-9
    assert (np.abs(numbers - exact) <= steps / 2).all()
    same = np.full_like(matrix.scale.numpy(), 120)
    kept, _, num_inexact = join_scales(codes, same)
    np.testing.assert_array_equal(kept, codes)
    assert num_inexact == 0


def test_joined_scales_keep_nan() -> None:
    codes = np.zeros((1, 1, 128), np.uint8)
    codes[0, 0, [3, 40]] = [0xFF, 0x7F]
    scale = np.array([[[100, 120, 120, 120]]], np.uint8)
    joined, _, num_inexact = join_scales(codes, scale)
    assert joined[0, 0, 3] == 0xFF and joined[0, 0, 40] == 0x7F and num_inexact == 0


def _joinable(num_experts: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Codes of three bits and more above the smallest, under scales within two powers of two."""
    rng = np.random.default_rng()
    codes = rng.integers(0x28, 0x78, (num_experts, 256, 512), dtype=np.uint8)
    scale = rng.integers(118, 121, (num_experts, 256, 16), dtype=np.uint8)
    return codes, scale


def test_scales_are_joined_where_no_number_changes() -> None:
    codes, scale = _joinable()
    joined, wide, num_inexact = join_scales(codes, scale)
    assert num_inexact == 0
    actual = prepare(codes, scale, (1, 32), is_fp4=False)
    expected = prepare(joined, wide, (1, 128), is_fp4=False)
    assert actual.scales.shape[-1] == 2 * 4
    np.testing.assert_array_equal(actual.codes, expected.codes)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    assert actual.num_inexact == 0


@pytest.mark.parametrize("change", ["join", "halving", "fp32"])
def test_scales_stay_where_a_number_would_change(change: str) -> None:
    """One number of the second expert is enough."""
    codes, scale = _joinable()
    if change == "join":
        scale[1, 5, 0:4], codes[1, 5, 3] = (118, 120, 120, 120), 0x01
    elif change == "halving":
        # Halved because of its neighbour's 448, which it need not be under a scale of its own.
        scale[1, 5, 0:4], codes[1, 5, [3, 40]] = 120, (0x01, 0x7E)
    factors = np.exp2(scale.astype(np.float32) - 127) if change == "fp32" else scale
    weight = prepare(codes, factors, (1, 32), is_fp4=False)
    assert weight.scales.shape[-1] == 2 * 16


def test_bytes_of_scales_that_do_not_fill_lanes_become_fp32() -> None:
    codes = np.full((1, 256, 128), 0x38, np.uint8)
    scale = np.full((1, 256, 1), 120, np.uint8)
    scale[0, 3] = 0
    weight = prepare(codes, scale, (1, 128), is_fp4=False)
    assert weight.scales.dtype == np.float32
    assert weight.scales[0, 0, 3, 0] == 0 and weight.scales[0, 0, 4, 0] == 2.0**-7
    assert weight.num_inexact == 128


def test_panels_are_large_enough() -> None:
    assert panel_blocks(16, 7168) == 1
    assert panel_blocks(56, 1024) == 4
    assert panel_blocks(7, 1024) == 7
    assert panel_blocks(28, 128) == 28
    assert panel_blocks(2, 20000) == 1


def test_layout_keeps_every_byte_once() -> None:
    matrix = random_matrix(FORMATS["fp8_128x128"], (3,), 512, 256)
    prepared = prepare_raw(matrix, FORMATS["fp8_128x128"], k_parts=2, is_interleaved=True)
    assert prepared.codes.shape[:2] == (3, 2)
    fitted, _, _ = fit_to_240(
        matrix.values.view(torch.uint8).numpy(), matrix.scale.numpy(), (128, 128)
    )
    for expert in range(3):
        ours, theirs = prepared.codes[expert].reshape(-1), fitted[expert].reshape(-1)
        np.testing.assert_array_equal(
            np.bincount(ours, minlength=256), np.bincount(theirs, minlength=256)
        )
    assert prepared.num_bytes == 512 * 256 + 4 * 2 * 4


@pytest.mark.parametrize(
    ("shape", "is_fp4", "k_parts", "reason"),
    [
        ((200, 128), False, 1, "multiple of 128"),
        ((128, 128), False, 1, "do not divide into 2"),
        ((256, 128), True, 1, "do not divide into 4"),
        ((256, 384), False, 2, "blocks of columns"),
        ((512, 384), True, 1, None),
    ],
)
def test_sizes_without_a_kernel(
    shape: tuple[int, int], is_fp4: bool, k_parts: int, reason: str | None
) -> None:
    found = why_not(*shape, num_cores=2, is_fp4=is_fp4, k_parts=k_parts)
    assert found is None if reason is None else reason in str(found)
    if reason is not None:
        values = np.zeros((1, shape[0], shape[1] // (2 if is_fp4 else 1)), np.uint8)
        scale = np.full((1, shape[0], shape[1] // 32), 120, np.uint8)
        with pytest.raises(ValueError, match="No kernel for a weight"):
            prepare(values, scale, (1, 32), is_fp4, k_parts=k_parts)
