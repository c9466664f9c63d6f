"""One body over the reference and the host kernel, against fp64."""

from collections.abc import Callable

import pytest
import torch
from oracle import assert_close
from torch import Tensor

from vllm_moe_ep_kernels.host.swiglu import swiglu as host_swiglu
from vllm_moe_ep_kernels.reference.swiglu import swiglu as reference_swiglu

Swiglu = Callable[[Tensor, Tensor, float | None, torch.dtype], Tensor]
both = pytest.mark.parametrize("swiglu", [reference_swiglu, host_swiglu], ids=["reference", "host"])


def _expected(gate_up: Tensor, row_weight: Tensor, limit: float | None) -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return row_weight.double()[:, None] * gate * torch.sigmoid(gate) * up


@both
@pytest.mark.parametrize("limit", [None, 0.5, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_values(swiglu: Swiglu, limit: float | None, dtype: torch.dtype, num_rows: int) -> None:
    gate_up = (3 * torch.randn(num_rows, 2 * 24)).to(dtype)
    row_weight = torch.randn(num_rows)
    before = gate_up.clone()
    actual = swiglu(gate_up, row_weight, limit, dtype)
    assert actual.dtype == dtype
    assert_close(actual, _expected(gate_up, row_weight, limit), dtype)
    assert torch.equal(gate_up, before)


@both
def test_fp32_out_of_fp16_does_not_overflow(swiglu: Swiglu) -> None:
    gate_up = torch.full((1, 2), 3e4, dtype=torch.float16)
    actual = swiglu(gate_up, torch.ones(1), None, torch.float32)
    assert_close(actual, _expected(gate_up, torch.ones(1), None), torch.float32)


@both
def test_clamp_of_infinity_and_a_row_of_nan(swiglu: Swiglu) -> None:
    gate_up = torch.tensor([[torch.inf, -torch.inf], [torch.nan, 1.0], [2.0, 3.0]])
    actual = swiglu(gate_up, torch.ones(3), 4.0, torch.float32)
    clamped = torch.tensor([[4.0, -4.0]])
    assert_close(actual[:1], _expected(clamped, torch.ones(1), None), torch.float32)
    assert actual[1].isnan().all()
    assert_close(actual[2:], _expected(gate_up[2:], torch.ones(1), 4.0), torch.float32)
