"""The kernels of few rows per expert, as a bundle of functions."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FILES = ("few_rows_plan", "few_rows_gate_up", "few_rows_down", "few_rows_combine")
# What the references, which compute the same however it is cut, are not told.
_TUNING = ("tiles", "is_overlapped")


@dataclass(frozen=True, slots=True)
class FewRowKernels:
    """Functions as documented in the kernels package's `reference`, by their names there.

    Beside those arguments the products take `tiles`, the others `is_overlapped`.
    """

    plan: Callable[..., Any]
    gate_up: Callable[..., None]
    down: Callable[..., None]
    down_combined: Callable[..., None]
    combine: Callable[..., None]


def load_few_row_kernels(package: str) -> FewRowKernels:
    """One implementation: "triton_kernels" on a GPU, "reference" anywhere (it waits for the GPU).

    Raises:
        ImportError: triton is asked for and not installed.
    """
    plan, gate_up, down, combine = (
        importlib.import_module(f"vllm_moe_ep_kernels.{package}.{file}") for file in _FILES
    )
    functions: tuple[Callable[..., Any], ...] = (
        plan.few_rows_plan,
        gate_up.few_rows_gate_up,
        down.few_rows_down,
        down.few_rows_down_combined,
        combine.few_rows_combine,
    )
    if package == "reference":
        functions = tuple(_without_tuning(function) for function in functions)
    return FewRowKernels(*functions)


def _without_tuning(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **{k: v for k, v in keywords.items() if k not in _TUNING})

    return call
