"""One body over the reference and the host kernels, against fp64."""

from collections.abc import Callable

import pytest
import quant_oracle
import torch
from oracle import rel_l2
from quantised_factory import WEIGHTS, random_matrix
from torch import Tensor

from vllm_moe_ep.quant.formats import FP8_128X128, QuantFormat
from vllm_moe_ep_kernels.host import block_linear as host
from vllm_moe_ep_kernels.reference import block_linear as reference

Linear = Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Tensor]
Gated = Callable[[Tensor, Tensor, Tensor, tuple[int, int], Tensor], Tensor]
linears = pytest.mark.parametrize(
    "block_linear", [reference.block_linear, host.block_linear], ids=["reference", "host"]
)
gated_linears = pytest.mark.parametrize(
    "gated_block_linear",
    [reference.gated_block_linear, host.gated_block_linear],
    ids=["reference", "host"],
)
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


@linears
@each_format
@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("shape", [(0, 64, 64), (1, 56, 72), (5, 576, 200), (3, 1300, 512)])
def test_values(
    block_linear: Linear,
    fmt: QuantFormat,
    dtype: torch.dtype,
    limit: float,
    shape: tuple[int, int, int],
) -> None:
    """The last shape is more than one tile."""
    num_rows, n, k = shape
    rows, matrix = torch.randn(num_rows, k).to(dtype), random_matrix(fmt, (), n, k)
    actual = block_linear(rows, matrix.values, matrix.scale, fmt.block_size)
    weight = quant_oracle.dequantise(matrix.values, matrix.scale, *fmt.block_size)
    assert rel_l2(actual, rows.double() @ weight.T) <= limit


@gated_linears
@each_format
@pytest.mark.parametrize(("dtype", "limit"), DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_gate(
    gated_block_linear: Gated, fmt: QuantFormat, dtype: torch.dtype, limit: float, num_rows: int
) -> None:
    rows, matrix = torch.randn(num_rows, 72).to(dtype), random_matrix(fmt, (), 56, 72)
    on, off = (torch.tensor([[value]], dtype=torch.int32) for value in (1, 0))
    weight = quant_oracle.dequantise(matrix.values, matrix.scale, *fmt.block_size)
    arguments = rows, matrix.values, matrix.scale, fmt.block_size
    assert rel_l2(gated_block_linear(*arguments, on), rows.double() @ weight.T) <= limit
    matrix.scale[:] = 255 if fmt.is_power_of_two else torch.nan
    assert torch.equal(gated_block_linear(*arguments, off).float(), torch.zeros(num_rows, 56))


def test_a_closed_gate_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the weight was read")

    monkeypatch.setattr(host, "dequantise", refuse)
    rows, matrix = torch.randn(3, 128), random_matrix(FP8_128X128, (), 64, 128)
    arguments = rows, matrix.values, matrix.scale, (128, 128)
    host.gated_block_linear(*arguments, torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="was read"):
        host.gated_block_linear(*arguments, torch.ones(1, 1, dtype=torch.int32))


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_block_linear_is_a_valid_op(fmt: QuantFormat, dtype: torch.dtype) -> None:
    rows, matrix = torch.randn(3, 64).to(dtype), random_matrix(fmt, (), 40, 64)
    arguments = rows, matrix.values, matrix.scale, fmt.block_size
    before = [tensor.clone() for tensor in (rows, matrix.values, matrix.scale)]
    flag = torch.ones(1, 1, dtype=torch.int32)
    # "test_schema" cannot compare fp8 tensors: that nothing is written is compared as bytes here.
    torch.library.opcheck(
        host.gated_block_linear, (*arguments, flag), test_utils=("test_faketensor",)
    )
    for tensor, old in zip((rows, matrix.values, matrix.scale), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
