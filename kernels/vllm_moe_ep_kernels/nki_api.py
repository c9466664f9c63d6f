"""NKI where it is installed, else this package's emulator of its subset.

The kernels know neither: they use ``nl`` and ``nisa`` from here, so that a device needs no
emulator, and the emulator no kernel.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

EMULATOR = "vllm_moe_ep_kernels.nki_emulator"


def _nki() -> Any:
    """The nki package, or None."""
    if importlib.util.find_spec("nki") is None:
        return None
    nki = importlib.import_module("nki")
    # A placeholder of the same name has neither.
    return nki if hasattr(nki, "jit") and hasattr(nki, "simulate") else None


def _module(name: str) -> Any:
    source = EMULATOR if nki is None else "nki"
    try:
        return importlib.import_module(f"{source}.{name}")
    except ImportError as error:
        raise ImportError(
            f"The NKI kernels need NKI, and found neither it nor this package's emulator of it "
            f"({error}): install nki as AWS describes it, or for tests ml-dtypes and all of "
            "vllm_moe_ep_kernels."
        ) from error


nki = _nki()
nl: Any = _module("language")
nisa: Any = _module("isa")


def run_on_cpu(kernel: Callable[..., Any], num_cores: int, arguments: dict[str, Any]) -> NDArray:
    """A kernel on NumPy arrays, in NKI's own simulator or in the emulator.

    The simulator's target is NEURON_PLATFORM_TARGET_OVERRIDE's.
    """
    if nki is not None:
        result: NDArray = nki.simulate(jitted(kernel, num_cores))(**arguments)
        return result
    output: NDArray = _module("simulate").simulate(kernel, num_cores, arguments).output
    return output


def jitted(kernel: Callable[..., Any], num_cores: int) -> Any:
    """A kernel compiled by NKI for so many cores.

    Raises:
        ImportError: NKI is not installed.
    """
    if nki is None:
        raise ImportError(
            "Tensors on a Neuron device need NKI, which is not installed: install nki as AWS "
            "describes it, or keep the tensors on the CPU."
        )
    compiled = nki.jit(kernel)
    return compiled[num_cores] if num_cores > 1 else compiled
