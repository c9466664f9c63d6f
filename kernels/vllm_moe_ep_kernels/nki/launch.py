"""Run a kernel on tensors: on the device, or those of the CPU in a simulator or the emulator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_moe_ep_kernels import nki_api

Kernel = Callable[..., Any]


def has_simulator() -> bool:
    """Whether NKI itself, with its simulator, is installed."""
    return nki_api.nki is not None


def launch(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> Tensor:
    """Run on tensors: those of the CPU go through the simulator or the emulator.

    Args:
        kernel: one of this package's kernels.
        num_cores: physical cores of the logical core.
        arguments: tensors, all on one device, and constants, by parameter name.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if tensors[0].device.type != "cpu":
        return nki_api.jitted(kernel, num_cores)(**arguments)
    return torch.from_numpy(nki_api.run_on_cpu(kernel, num_cores, as_arrays(arguments)))


def as_arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """Tensors as NumPy arrays of the same bits; all else as it is."""
    import ml_dtypes

    def array_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.contiguous()
        if value.dtype is torch.bfloat16:
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()

    return {name: array_of(value) for name, value in arguments.items()}
