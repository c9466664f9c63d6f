"""Weight scales per device: untouched, packed, refused, or requantised where asked."""

import numpy as np
import pytest
import torch
from numpy_formats import ceil_byte, packed_storage, raw_storage, to_e4m3
from oracle import rel_l2

from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp4_weight, prepare_fp8_weight
from vllm_moe_ep.errors import UnsupportedError

BLOCK = (128, 128)
# Of one rounding to fp8: 0.026 on average over the factors between two powers of two, and up to
# this at the worst, since the values come from a grid of eight mantissas.
REQUANTISED_LIMIT = 0.042
blocks = pytest.mark.parametrize("block_size", [(128, 128), (1, 128)])


def _dequantise(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows = scale.repeat_interleave(block[0], -2)[..., : values.shape[-2], :]
    return values.double() * rows.repeat_interleave(block[1], -1)[..., : values.shape[-1]]


def _quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """128x128 blocks, scale = amax / 448; both sides of the matrix divisible by 128."""
    *batch, rows, width = weight.shape
    parts = weight.view(*batch, rows // 128, 128, width // 128, 128)
    scale = parts.abs().amax(dim=(-3, -1)) / 448
    values = (parts / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(weight.shape), scale


def _random_fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def _scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> list[int]:
    return [*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])]


def _unpacked(prepared: ScaledWeight, groups: int) -> torch.Tensor:
    """fp32 [n, groups] of a packed scale, by its documented bytes."""
    raw = raw_storage(prepared.scale)
    num_rows = prepared.scale.shape[0]
    scale_bytes = raw.transpose(1, 0, 2).reshape(raw.shape[1], -1)[:num_rows, :groups]
    return torch.tensor(np.ldexp(np.float64(1), scale_bytes.astype(np.int32) - 127))


@blocks
@pytest.mark.parametrize("shape", [(576, 7168), (3, 256, 384), (130, 200)])
def test_fp32_scales_stay_untouched_on_sm90(
    shape: tuple[int, ...], block_size: tuple[int, int]
) -> None:
    values = _random_fp8(*shape)
    scale = torch.rand(_scale_shape(shape, block_size)) + 0.01
    prepared = prepare_fp8_weight("w", values, scale, block_size, 9)
    assert prepared.values is values and prepared.scale is scale
    assert prepared.scale_fmt == "float32" and prepared.block_n == block_size[0]


def test_576_rows_have_5_scale_rows_and_padded_ones_are_refused() -> None:
    values, scale = _random_fp8(576, 256), torch.rand(8, 2) + 0.1
    with pytest.raises(ValueError, match=r"layer.w13.*must be \[5, 2\].*found \[8, 2\]"):
        prepare_fp8_weight("layer.w13", values, scale, BLOCK, 9)
    padded_stride = torch.rand(2, 8).T[:5]
    with pytest.raises(ValueError, match="must be contiguous"):
        prepare_fp8_weight("layer.w13", values, padded_stride, BLOCK, 9)
    assert prepare_fp8_weight("layer.w13", values, scale[:5], BLOCK, 9).scale.shape == (5, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_e8m0_becomes_fp32_exactly_on_sm90(dtype: torch.dtype) -> None:
    scale_bytes = torch.arange(255, dtype=torch.uint8).view(255, 1)
    values = _random_fp8(255, 128)
    prepared = prepare_fp8_weight("w", values, scale_bytes.view(dtype), (1, 128), 9)
    assert prepared.scale.dtype == torch.float32 and prepared.scale_fmt == "float32"
    assert prepared.scale.flatten().double().tolist() == [2.0 ** (b - 127) for b in range(255)]


@blocks
@pytest.mark.parametrize("form", ["float32", "e8m0", "uint8"])
@pytest.mark.parametrize("shape", [(2, 256, 640), (3, 200, 300), (1, 130, 128)])
def test_powers_of_two_are_packed_per_row_on_sm100(
    shape: tuple[int, ...], form: str, block_size: tuple[int, int]
) -> None:
    values = _random_fp8(*shape)
    # Byte 0, 2**-127, is no normal fp32 number.
    smallest = 1 if form == "float32" else 0
    scale_shape = _scale_shape(shape, block_size)
    scale_bytes = torch.randint(smallest, 255, scale_shape, dtype=torch.uint8)
    powers = torch.exp2(scale_bytes.double() - 127).float()
    scale = {
        "float32": powers,
        "e8m0": scale_bytes.view(torch.float8_e8m0fnu),
        "uint8": scale_bytes,
    }[form]
    prepared = prepare_fp8_weight("w", values, scale, block_size, 10)
    assert prepared.values is values
    assert prepared.scale_fmt == "ue8m0_packed" and prepared.block_n == 1
    for packed, encoded in zip(prepared.scale, scale_bytes, strict=True):
        per_row = np.repeat(encoded.numpy(), block_size[0], axis=0)[: shape[-2]]
        assert np.array_equal(raw_storage(packed), packed_storage(per_row))


def test_plain_fp32_scales_are_refused_on_sm100_with_the_remedy() -> None:
    values, scale = _quantise(torch.randn(256, 256))
    with pytest.raises(UnsupportedError, match="layer.w2.*UE8M0 scales.*requantise"):
        prepare_fp8_weight("layer.w2", values, scale, BLOCK, 10)


def test_requantised_weight_is_the_same_within_rounding() -> None:
    weight = torch.randn(256, 256)
    values, scale = _quantise(weight)
    before = values.view(torch.uint8).clone()
    prepared = prepare_fp8_weight("w", values, scale, BLOCK, 10, requantise=True)
    assert torch.equal(values.view(torch.uint8), before)
    powers = _unpacked(prepared, 2)
    rounded = torch.tensor([[2.0 ** (ceil_byte(s) - 127) for s in row] for row in scale.tolist()])
    assert torch.equal(powers.float(), rounded.repeat_interleave(128, 0))
    ratio = (scale / rounded).repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = to_e4m3((values.float() * ratio).numpy())
    assert np.array_equal(prepared.values.view(torch.uint8).numpy(), expected)
    requantised = _dequantise(prepared.values, powers, (1, 128))
    assert rel_l2(requantised, _dequantise(values, scale, BLOCK)) <= REQUANTISED_LIMIT
    # The first rounding, to the checkpoint's fp8, is 0.026.
    assert rel_l2(requantised, weight) <= 0.05
    # Rounding the scale alone, without new values, is what must not happen.
    assert rel_l2(_dequantise(values, powers, (1, 128)), weight) > 0.1


def test_requantising_works_per_expert_and_on_ragged_edges() -> None:
    values = _random_fp8(3, 200, 300)
    scale = torch.rand(3, 2, 3) + 0.01
    prepared = prepare_fp8_weight("w", values, scale, BLOCK, 10, requantise=True)
    for index in range(3):
        one = ScaledWeight(prepared.values[index], prepared.scale[index], "ue8m0_packed", 1)
        expected = _dequantise(values[index], scale[index], BLOCK)
        assert (
            rel_l2(_dequantise(one.values, _unpacked(one, 3), (1, 128)), expected)
            <= REQUANTISED_LIMIT
        )


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("bad", [0.0, torch.inf, -1.0, torch.nan, 3e38])
def test_bad_scales_are_refused_by_name(major: int, bad: float) -> None:
    scale = torch.ones(2, 3)
    scale[1, 2] = bad
    with pytest.raises(ValueError, match=r"layer.w13.*first at \[1, 2\]"):
        prepare_fp8_weight("layer.w13", _random_fp8(256, 384), scale, BLOCK, major)


@pytest.mark.parametrize("major", [9, 10])
def test_the_nan_byte_is_refused(major: int) -> None:
    scale = torch.tensor([[127, 255]], dtype=torch.uint8)
    with pytest.raises(ValueError, match="layer.w2 holds NaN"):
        prepare_fp8_weight("layer.w2", _random_fp8(128, 256), scale, BLOCK, major)


@pytest.mark.parametrize("block_size", [(64, 128), (128, 64), (128, 1), (1, 32)])
def test_other_blocks_are_refused(block_size: tuple[int, int]) -> None:
    scale = torch.ones(_scale_shape((128, 128), block_size))
    with pytest.raises(UnsupportedError, match="128x128 and 1x128"):
        prepare_fp8_weight("w", _random_fp8(128, 128), scale, block_size, 9)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="float8_e4m3fn, found torch.bfloat16"):
        prepare_fp8_weight("w", torch.zeros(128, 128).bfloat16(), torch.ones(1, 1), BLOCK, 9)
    with pytest.raises(UnsupportedError, match="float8_e8m0fnu.*found torch.float16"):
        prepare_fp8_weight("w", _random_fp8(128, 128), torch.ones(1, 1).half(), BLOCK, 9)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_fp4_scales_are_packed_without_repeating(dtype: torch.dtype) -> None:
    values = torch.randint(0, 128, (2, 48, 160), dtype=torch.uint8).to(dtype)
    scale_bytes = torch.randint(0, 255, (2, 48, 10), dtype=torch.uint8)
    prepared = prepare_fp4_weight("w", values, scale_bytes.view(torch.float8_e8m0fnu), 10)
    assert prepared.values is values
    for packed, encoded in zip(prepared.scale, scale_bytes, strict=True):
        assert np.array_equal(raw_storage(packed), packed_storage(encoded.numpy()))


def test_fp4_refusals() -> None:
    values, scale = torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="SM100 only, not on SM90.*marlin"):
        prepare_fp4_weight("w", values, scale, 9)
    with pytest.raises(UnsupportedError, match="found torch.float32"):
        prepare_fp4_weight("w", values.float(), scale, 10)
    with pytest.raises(UnsupportedError, match="found torch.float32"):
        prepare_fp4_weight("w", values, scale.float(), 10)
    with pytest.raises(ValueError, match=r"must be \[8, 4\]"):
        prepare_fp4_weight("w", values, scale[:, :2].contiguous(), 10)


def test_scales_round_up_and_never_down() -> None:
    scale = torch.tensor([[0.003], [1.5], [1.0], [2.0**-126], [1.0000001]])
    prepared = prepare_fp8_weight("w", _random_fp8(5, 128), scale, (1, 128), 10, requantise=True)
    expected = [2.0**-8, 2.0, 1.0, 2.0**-126, 2.0]
    assert _unpacked(prepared, 1).flatten().tolist() == expected
