"""The work around the two grouped products, as a bundle of functions."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowKernels:
    """Functions as documented in the kernels package's `reference`, by their names there."""

    plan_rows: Callable[[Tensor, Tensor | None, int, int], tuple[Tensor, Tensor]]
    scatter_rows: Callable[[Tensor, Tensor, Tensor], None]
    scatter_rows_fp8: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    swiglu_rows: Callable[[Tensor, Tensor, float | None, Tensor], None]
    swiglu_rows_fp8: Callable[[Tensor, Tensor, float | None, Tensor, Tensor], None]
    combine_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]


_FILES = ("plan_rows", "scatter_rows", "swiglu_rows", "combine_rows")


def load_row_kernels(package: str) -> RowKernels:
    """One implementation: "triton_kernels" on a GPU, "reference" anywhere (it waits for the GPU).

    Raises:
        ImportError: triton is asked for and not installed.
    """
    files = {
        file: importlib.import_module(f"vllm_moe_ep_kernels.{package}.{file}") for file in _FILES
    }
    return RowKernels(
        plan_rows=files["plan_rows"].plan_rows,
        scatter_rows=files["scatter_rows"].scatter_rows,
        scatter_rows_fp8=files["scatter_rows"].scatter_rows_fp8,
        swiglu_rows=files["swiglu_rows"].swiglu_rows,
        swiglu_rows_fp8=files["swiglu_rows"].swiglu_rows_fp8,
        combine_rows=files["combine_rows"].combine_rows,
    )
