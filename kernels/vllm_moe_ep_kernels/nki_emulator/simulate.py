"""Run a kernel on the cores of one logical core."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator.core import Core
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.rules import require
from vllm_moe_ep_kernels.nki_emulator.storage import READ, SHARED_HBM, WRITTEN, Storage, pattern
from vllm_moe_ep_kernels.nki_emulator.tensor import Tensor
from vllm_moe_ep_kernels.nki_emulator.trace import check_same


@dataclass(frozen=True)
class Run:
    """What a kernel returned and cost.

    Attributes:
        output: the returned tensor.
        counts: per core.
        inputs: the HBM tensors by parameter name.
    """

    output: NDArray
    counts: tuple[Counts, ...]
    inputs: dict[str, Storage]

    def bytes_covered(self, name: str) -> int:
        """Bytes of an input that any core read at least once."""
        marks = self.inputs[name].marks
        return int(np.count_nonzero(marks.reshape(-1).view(np.uint8) & READ))

    def bytes_read(self, *names: str) -> int:
        return sum(counts.bytes_read(*names) for counts in self.counts)


def simulate(kernel: Callable[..., Any], num_cores: int, arguments: dict[str, Any]) -> Run:
    """Run the kernel once per core; outputs are the same HBM tensors for both.

    Args:
        kernel: takes arrays as HBM tensors, and constants.
        num_cores: 1, or 2 for LNC=2.
        arguments: by parameter name; NumPy arrays are tensors, None and all else constants.

    Raises:
        NkiRuleError: the kernel broke a rule.
    """
    require(num_cores in (1, 2), f"A logical core has 1 or 2 cores, not {num_cores}.")
    inputs = {
        name: _input(name, value)
        for name, value in arguments.items()
        if isinstance(value, np.ndarray)
    }
    given = {
        name: Tensor.of(inputs[name]) if name in inputs else value
        for name, value in arguments.items()
    }
    runs = [_traced_run(kernel, index, num_cores, given) for index in range(num_cores)]
    trips = [core.counts.trips for core, _ in runs]
    require(
        all(one == trips[0] for one in trips),
        f"The cores of a logical core took different trips through dynamic loops: {trips}.",
    )
    for core, _ in runs[1:]:
        check_same(
            runs[0][0].scope.trace,
            core.scope.trace,
            "The cores of a logical core issued different instructions.",
            other_hbm=True,
        )
    output = _merge([result for _, result in runs])
    return Run(output, tuple(core.counts for core, _ in runs), inputs)


def _input(name: str, value: NDArray) -> Storage:
    storage = Storage(value.shape, value.dtype, SHARED_HBM, name, None)
    storage.fill(value)
    return storage


def _traced_run(
    kernel: Callable[..., Any], index: int, num_cores: int, given: dict[str, Any]
) -> tuple[Core, Tensor]:
    """Trace the kernel as a compiler does, each loop's body once; then run it."""
    compiled, core = Core(index, num_cores, is_dry=True), Core(index, num_cores)
    _call(kernel, compiled, given)
    result = _call(kernel, core, given)
    require(
        isinstance(result, Tensor) and result.buffer == SHARED_HBM,
        "A kernel returns one tensor, in shared_hbm.",
    )
    check_same(
        compiled.scope.trace,
        core.scope.trace,
        "A kernel issued other instructions than when it was traced: Python state that a loop "
        "body changes cannot choose what follows, since the device traces the body once.",
    )
    return core, result


def _call(kernel: Callable[..., Any], core: Core, given: dict[str, Any]) -> Any:
    cores.enter(core)
    try:
        return kernel(**given)
    finally:
        cores.leave()


def _merge(results: list[Tensor]) -> NDArray:
    """The cores' writes to what on the device is one tensor."""
    written = pattern(WRITTEN, results[0].marks.itemsize)
    first = results[0]
    merged, total = np.zeros_like(first.data), np.zeros(first.shape, np.int64)
    for result in results:
        require(result.shape == first.shape and result.dtype == first.dtype, "Outputs differ.")
        is_written = result.marks & written == written
        merged = np.where(is_written, result.data, merged)
        total += is_written
    require(bool((total >= 1).all()), "A part of the output was never written.")
    require(bool((total <= 1).all()), "Both cores wrote the same part of the output.")
    return merged
