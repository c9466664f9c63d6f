"""Run a kernel: on the device, in NKI's simulator, or in the emulator."""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from vllm_moe_ep_kernels.nki import api

Kernel = Callable[..., Any]


def has_simulator() -> bool:
    """Whether NKI itself, with its simulator, is installed."""
    return api.nki is not None


def run_simulated(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> NDArray:
    """NKI's own simulator on NumPy arrays; the target is NEURON_PLATFORM_TARGET_OVERRIDE's."""
    jitted = api.nki.jit(kernel)
    return api.nki.simulate(jitted[num_cores] if num_cores > 1 else jitted)(**arguments)


def run_emulated(kernel: Kernel, num_cores: int, arguments: dict[str, Any]) -> NDArray:
    """The emulator on NumPy arrays."""
    from vllm_moe_ep_kernels.nki_emulator.simulate import simulate

    return simulate(kernel, num_cores, arguments).output
