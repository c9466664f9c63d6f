"""Kernels run in NKI's simulator where it is installed, else in the emulator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from quantised_factory import RawMatrix
from torch import Tensor

from vllm_moe_ep.quant.formats import FORMATS, QuantFormat
from vllm_moe_ep_kernels.nki.launch import as_arrays, has_simulator
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_api import run_on_cpu
from vllm_moe_ep_kernels.nki_emulator.simulate import Run, simulate

ACTIVATION = FORMATS["fp8_1x32_ue8m0"].with_max(240.0)
WEIGHTS = [
    FORMATS[name]
    for name in ("fp8_128x128", "fp8_128x128_ue8m0", "fp8_1x32_ue8m0", "fp8_1x32", "fp4_1x32")
]


@dataclass(frozen=True)
class Result:
    """A kernel's output, and the emulator's counts unless NKI's simulator ran it."""

    output: Tensor
    run: Run | None


def run_kernel(kernel: Callable[..., Any], num_cores: int, **arguments: Any) -> Result:
    arrays = as_arrays(arguments)
    if has_simulator():
        return Result(torch.from_numpy(run_on_cpu(kernel, num_cores, arrays)), None)
    run = simulate(kernel, num_cores, arrays)
    return Result(torch.from_numpy(run.output.astype(np.float32)), run)


def prepare_raw(matrix: RawMatrix, fmt: QuantFormat, **layout: Any) -> PreparedWeight:
    """A stack [experts, n, k] of quantised matrices in the kernels' layout."""
    values: NDArray = matrix.values.view(torch.uint8).numpy()
    return prepare(values, matrix.scale.numpy(), fmt.block_size, fmt.is_fp4, **layout)
