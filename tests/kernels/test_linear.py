"""One body over the reference and the host kernels, against fp64."""

from collections.abc import Callable

import pytest
import torch
from oracle import assert_close
from torch import Tensor

from vllm_moe_ep_kernels.host import linear as host
from vllm_moe_ep_kernels.reference import linear as reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
linears = pytest.mark.parametrize(
    "linear", [reference.linear, host.linear], ids=["reference", "host"]
)
gated_linears = pytest.mark.parametrize(
    "gated_linear", [reference.gated_linear, host.gated_linear], ids=["reference", "host"]
)


@linears
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 40])
def test_values(
    linear: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, num_rows: int
) -> None:
    rows, weight = torch.randn(num_rows, 72).to(dtype), torch.randn(56, 72).to(dtype)
    assert_close(linear(rows, weight), rows.double() @ weight.double().T, dtype)


@linears
def test_fp16_sums_past_its_largest_number(linear: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows, weight = (torch.full((2, 64), value, dtype=torch.float16) for value in (100.0, 100.0))
    assert linear(rows, weight).tolist() == [[640000.0, 640000.0]] * 2


@linears
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 5, 17, 34, 62, 64, 97, 130])
def test_nan_stays_in_its_row(
    linear: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, k: int
) -> None:
    """With AMX, oneDNN lets it into the row before where k is odd or no multiple of 4."""
    for num_rows in (2, 5, 16, 33):
        rows, weight = torch.randn(num_rows, k).to(dtype), torch.randn(40, k).to(dtype)
        rows[1::2] = torch.nan
        result = linear(rows, weight)
        assert_close(result[::2], rows[::2].double() @ weight.double().T, dtype)
        assert result[1::2].isnan().all()


@gated_linears
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_gate(
    gated_linear: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype, num_rows: int
) -> None:
    rows, weight = torch.randn(num_rows, 72).to(dtype), torch.randn(56, 72).to(dtype)
    on, off = (torch.tensor([[value]], dtype=torch.int32) for value in (1, 0))
    assert_close(gated_linear(rows, weight, on), rows.double() @ weight.double().T, dtype)
    weight[:] = torch.nan
    assert torch.equal(gated_linear(rows, weight, off).float(), torch.zeros(num_rows, 56))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_linear_is_a_valid_op(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(3, 8).to(dtype), torch.randn(4, 8).to(dtype)
    flag = torch.ones(1, 1, dtype=torch.int32)
    torch.library.opcheck(
        host.gated_linear, (rows, weight, flag), test_utils=("test_schema", "test_faketensor")
    )
