"""One body over the reference and the host op, bit for bit against the definitions."""

from collections.abc import Callable

import pytest
import quant_oracle
import torch
from quantised_factory import WEIGHTS
from torch import Tensor

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep_kernels.host import quantise_dequantise as host
from vllm_moe_ep_kernels.reference import quantise_dequantise as reference

both = pytest.mark.parametrize(
    "quantise_dequantise",
    [reference.quantise_dequantise, host.quantise_dequantise],
    ids=["reference", "host"],
)
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)


@both
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (130, 200)])
def test_values(
    quantise_dequantise: Callable[..., Tensor],
    fmt: QuantFormat,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    values = torch.randn(shape).to(dtype)
    before = values.clone()
    how = fmt.max_value, fmt.is_power_of_two, fmt.is_fp4
    actual = quantise_dequantise(values, fmt.block_size, *how)
    blocks = quant_oracle.Blocks(fmt.block_size[0], fmt.block_size[1], *how)
    expected = quant_oracle.quantise_dequantise(values, blocks)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, expected.float())
    assert torch.equal(values, before)


@each_format
def test_is_a_valid_op(fmt: QuantFormat) -> None:
    torch.library.opcheck(
        host.quantise_dequantise,
        (torch.randn(3, 200), fmt.block_size, fmt.max_value, fmt.is_power_of_two, fmt.is_fp4),
        test_utils=("test_schema", "test_faketensor"),
    )
