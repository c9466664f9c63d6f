"""Run a kernel: on the device, in NKI's simulator, or in the emulator."""

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_moe_ep_kernels.nki import api

Kernel = Callable[..., Any]


def has_simulator() -> bool:
    """Whether NKI itself, with its simulator, is installed."""
    return api.nki is not None


def launch(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> Tensor:
    """Run on tensors: those of the CPU go through the simulator or the emulator.

    Args:
        kernel: one of this package's kernels.
        num_cores: physical cores of the logical core.
        arguments: tensors, all on one device, and constants, by parameter name.
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    if tensors[0].device.type != "cpu":
        return _jitted(kernel, num_cores)(**arguments)
    run = run_simulated if has_simulator() else run_emulated
    return torch.from_numpy(run(kernel, num_cores, as_arrays(arguments)))


def run_simulated(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> NDArray:
    """NKI's own simulator on NumPy arrays; the target is NEURON_PLATFORM_TARGET_OVERRIDE's."""
    return api.nki.simulate(_jitted(kernel, num_cores))(**arguments)


def run_emulated(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> NDArray:
    """The emulator on NumPy arrays."""
    from vllm_moe_ep_kernels.nki_emulator.simulate import simulate

    return simulate(kernel, num_cores, arguments).output


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


def _jitted(kernel: Kernel, num_cores: int) -> Any:
    jitted = api.nki.jit(kernel)
    return jitted[num_cores] if num_cores > 1 else jitted
