"""The two implementations of the row kernels, and the device each runs on."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "triton_kernels")
SMALLEST_NORMAL_E4M3 = 2.0**-6
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@dataclass(frozen=True)
class RowKernels:
    """Functions of one implementation, looked up by file and name."""

    package: str
    device: str

    @property
    def bf16_rtol(self) -> float:
        """Triton's interpreter cuts bf16 off instead of rounding it."""
        return 2**-7 if self.is_interpreted else 2**-8

    @property
    def is_interpreted(self) -> bool:
        return self.package == "triton_kernels" and self.device == "cpu"

    def check_fp8(self, actual: Tensor, wanted: Tensor) -> None:
        """fp8 values against fp32 numbers: at most one step apart, and rarely that.

        The interpreter's own cast knows neither fp8's NaN nor its subnormal numbers, errs
        where a number rounds up to a power of two, and rounds ties in its own way.
        """
        rounded = wanted.clamp(-448, 448).to(torch.float8_e4m3fn)
        steps = fp8_steps(actual, rounded)
        is_nan = wanted.isnan()
        if self.is_interpreted:
            keeps_exponent = wanted.frexp().exponent == rounded.float().frexp().exponent
            is_normal = wanted.abs() >= 2 * SMALLEST_NORMAL_E4M3
            steps = steps[~is_nan & is_normal & keeps_exponent]
        else:
            assert bool(actual.float()[is_nan].isnan().all())
            steps = steps[~is_nan]
        assert bool((steps <= 1).all()), f"{int(steps.max())} fp8 steps apart"
        percent = 10 if self.is_interpreted else 1
        assert int((steps > 0).sum()) <= steps.numel() * percent // 100 + 1

    def get(self, file: str, name: str | None = None) -> Callable[..., Any]:
        module = importlib.import_module(f"vllm_moe_ep_kernels.{self.package}.{file}")
        return getattr(module, name or file)


def row_kernels(implementation: str) -> RowKernels:
    """Triton runs on a GPU, or on CPU by its interpreter where TRITON_INTERPRET=1 is set."""
    if implementation == "reference":
        return RowKernels("reference", "cpu")
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return RowKernels("triton_kernels", "cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU; test_triton_interpreter.py runs this with TRITON_INTERPRET=1")
    return RowKernels("triton_kernels", "cpu")


def fp8_steps(actual: Tensor, expected: Tensor) -> Tensor:
    """Codes between two e4m3 tensors, in order of their values."""
    codes = [tensor.contiguous().view(torch.uint8).int() for tensor in (actual, expected)]
    signed = [torch.where(code >= 128, 128 - code, code) for code in codes]
    return (signed[0] - signed[1]).abs()


def random_rows(num_tokens: int, top_k: int, num_rows: int) -> Tensor:
    """int32 [num_tokens, top_k] distinct rows in random order, about every fifth one -1."""
    rows = torch.randperm(num_rows)[: num_tokens * top_k].view(num_tokens, top_k)
    return torch.where(torch.rand(num_tokens, top_k) < 0.2, -1, rows).to(torch.int32)
