"""One body over the reference and the host op, bit for bit against the definitions."""

from collections.abc import Callable

import pytest
import quant_oracle
import torch
from quantised_factory import ACTIVATIONS, WEIGHTS
from torch import Tensor

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep_kernels.host import cast_rows
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


@pytest.mark.parametrize("fmt", [fmt for fmt in ACTIVATIONS if fmt], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(0, 64), (3, 200)])
def test_rows_stored_and_read_back(fmt: QuantFormat, shape: tuple[int, int]) -> None:
    """Bit for bit what both in one give, also from strided parts of a wider buffer."""
    rows = torch.randn(shape).bfloat16()
    how = fmt.max_value, fmt.is_power_of_two
    values, scale = cast_rows.quantise_rows(rows, fmt.block_size[1], *how)
    wide_values = torch.cat([values.view(torch.uint8)] * 2, dim=1).view(values.dtype)
    wide_scale = torch.cat([scale, scale], dim=1)
    parts = wide_values[:, : shape[1]], wide_scale[:, : scale.shape[1]]
    expected = reference.quantise_dequantise(rows, fmt.block_size, *how, False)
    assert torch.equal(cast_rows.dequantise_rows(*parts, fmt.block_size[1]), expected)


def test_stored_rows_are_valid_ops() -> None:
    rows = torch.randn(3, 200)
    values, scale = cast_rows.quantise_rows(rows, 32, 448.0, True)
    for op, arguments in (
        (cast_rows.quantise_rows, (rows, 128, 448.0, False)),
        (cast_rows.quantise_rows, (rows, 32, 448.0, True)),
        (cast_rows.dequantise_rows, (values, scale, 32)),
    ):
        # The other checks of torch cannot compare fp8 tensors.
        torch.library.opcheck(op, arguments, test_utils=("test_faketensor",))
