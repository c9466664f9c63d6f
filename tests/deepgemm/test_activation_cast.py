"""Activations in fp8: values and scales bit for bit against a numpy model."""

import numpy as np
import pytest
import torch
from numpy_formats import ceil_byte, packed_storage, raw_storage, to_e4m3

from vllm_moe_ep.deepgemm.activation_cast import activation_format, cast_activation
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.formats import FP8_1X32_UE8M0, FP8_1X128, FP8_1X128_UE8M0, QuantFormat


def _model_scale(rows: np.ndarray, group_size: int) -> np.ndarray:
    num_rows, width = rows.shape
    scale = np.zeros((num_rows, -(-width // group_size)), dtype=np.float32)
    for row in range(num_rows):
        for group in range(scale.shape[1]):
            part = rows[row, group * group_size : (group + 1) * group_size]
            scale[row, group] = max(np.abs(part).max() / np.float32(448), np.float32(2.0**-126))
    return scale


def _model_values(rows: np.ndarray, scale: np.ndarray, group_size: int) -> np.ndarray:
    per_column = np.repeat(scale, group_size, axis=1)[:, : rows.shape[1]]
    return to_e4m3(rows / per_column)


def _rows(num_rows: int, width: int) -> torch.Tensor:
    spread = 10 ** (6 * torch.rand(num_rows, 1) - 3)
    rows = (torch.randn(num_rows, width) * spread).to(torch.bfloat16)
    rows[: num_rows // 8] = 0
    return rows


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (("fp4", "ue8m0", 10), (32, "ue8m0_packed")),
        (("fp8", "ue8m0", 10), (128, "ue8m0_packed")),
        (("fp8", "ue8m0", 9), (128, "float32")),
        (("fp8", "float32", 9), (128, "float32")),
    ],
)
def test_rules(weights: tuple[str, str, int], expected: tuple[int, str]) -> None:
    found = activation_format(*weights)
    scale_fmt = "ue8m0_packed" if found.is_power_of_two else "float32"
    assert (found.block_size, scale_fmt) == ((1, expected[0]), expected[1])
    assert found.dtype == torch.float8_e4m3fn and found.max_value == 448


@pytest.mark.parametrize(
    "weights", [("fp4", "ue8m0", 9), ("fp8", "float32", 10), ("int8", "float32", 9)]
)
def test_no_rule(weights: tuple[str, str, int]) -> None:
    with pytest.raises(UnsupportedError, match=f"{weights[0]} weights.*SM{weights[2]}0. It takes"):
        activation_format(*weights)


@pytest.mark.parametrize(("num_rows", "width"), [(0, 256), (1, 128), (16, 512), (9, 200)])
def test_fp32_scales(num_rows: int, width: int) -> None:
    rows = _rows(num_rows, width)
    cast = cast_activation(rows, FP8_1X128)
    plain = rows.float().numpy()
    expected = _model_scale(plain, 128)
    assert cast.scale.is_contiguous()
    assert np.array_equal(cast.scale.numpy(), expected)
    values = cast.values.view(torch.uint8).numpy()
    assert np.array_equal(values, _model_values(plain, expected, 128))


@pytest.mark.parametrize("fmt", [FP8_1X32_UE8M0, FP8_1X128_UE8M0], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (16, 512), (9, 200)])
def test_packed_scales_round_up_before_packing(num_rows: int, width: int, fmt: QuantFormat) -> None:
    group_size = fmt.block_size[1]
    rows = _rows(num_rows, width)
    cast = cast_activation(rows, fmt)
    plain = rows.float().numpy()
    scale = _model_scale(plain, group_size)
    scale_bytes = np.vectorize(ceil_byte, otypes=[np.uint8])(scale.astype(np.float64))
    assert np.array_equal(raw_storage(cast.scale), packed_storage(scale_bytes))
    powers = np.ldexp(np.float32(1), scale_bytes.astype(np.int32) - 127)
    values = cast.values.view(torch.uint8).numpy()
    assert np.array_equal(values, _model_values(plain, powers, group_size))


@pytest.mark.parametrize("fmt", [FP8_1X128, FP8_1X128_UE8M0], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_stays_alone(fmt: QuantFormat, bad: float) -> None:
    rows = _rows(8, 256)
    clean = cast_activation(rows, fmt)
    rows[3, 5] = bad
    cast = cast_activation(rows, fmt)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(
        cast.values[others].view(torch.uint8), clean.values[others].view(torch.uint8)
    )
    assert torch.equal(cast.scale[others], clean.scale[others])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="found torch.float16.*--dtype bfloat16"):
        cast_activation(torch.zeros(1, 128, dtype=torch.float16), FP8_1X128)
