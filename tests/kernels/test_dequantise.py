"""One body over the reference and the host kernel, bit for bit against the definitions."""

from collections.abc import Callable

import pytest
import quant_oracle
import torch
from quantised_factory import WEIGHTS, random_matrix
from torch import Tensor

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep_kernels.host.dequantise import dequantise as host_dequantise
from vllm_moe_ep_kernels.reference.dequantise import dequantise as reference_dequantise

Dequantise = Callable[[Tensor, Tensor, tuple[int, int], torch.dtype], Tensor]
both = pytest.mark.parametrize(
    "dequantise", [reference_dequantise, host_dequantise], ids=["reference", "host"]
)
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)


def _assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal, and NaN where NaN."""
    assert torch.equal(actual.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(actual[known], expected[known])


@both
@each_format
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 64), (1, 2), (576, 256), (130, 200)])
def test_values(
    dequantise: Dequantise, fmt: QuantFormat, out_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    matrix = random_matrix(fmt, (), *shape)
    before = matrix.scale.clone()
    actual = dequantise(matrix.values, matrix.scale, fmt.block_size, out_dtype)
    expected = quant_oracle.dequantise(matrix.values, matrix.scale, *fmt.block_size)
    assert actual.dtype == out_dtype
    assert torch.equal(actual, expected.float().to(out_dtype))
    assert torch.equal(matrix.scale, before)


@both
@pytest.mark.parametrize("is_fp4", [False, True])
def test_every_byte_under_every_power_of_two(dequantise: Dequantise, is_fp4: bool) -> None:
    """All 256 bytes by all 256 UE8M0 scales; what exceeds fp32 is infinity."""
    values = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    values = values if is_fp4 else values.view(torch.float8_e4m3fn)
    block_size = (1, 512 if is_fp4 else 256)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    expected = quant_oracle.dequantise(values, scale, *block_size).float()
    for form in (scale, scale.view(torch.float8_e8m0fnu)):
        actual = dequantise(values, form, block_size, torch.float32)
        _assert_same(actual, expected)


@both
@pytest.mark.parametrize("scale", [torch.inf, 0.0, -1.5, 1e-42, 3e38])
def test_odd_fp32_scales(dequantise: Dequantise, scale: float) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    scales = torch.full((1, 2), scale)
    actual = dequantise(values, scales, (128, 128), torch.float32)
    expected = quant_oracle.dequantise(values, scales, 128, 128).float()
    _assert_same(actual, expected)
