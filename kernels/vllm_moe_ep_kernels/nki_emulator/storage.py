"""Memory: bytes, and for each byte whether it was written, by what, and whether it was read."""

import math

import numpy as np
from numpy.typing import NDArray

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator.core import Core, Scope
from vllm_moe_ep_kernels.nki_emulator.rules import require

SBUF, PSUM, SHARED_HBM = "sbuf", "psum", "shared_hbm"
WRITTEN, BY_MATMUL, READ = 0x01, 0x02, 0x10
# Every float format reads this as NaN, and int32 as -1.
_POISON = 0xFF


def pattern(flag: int, itemsize: int) -> int:
    """The flag in each byte of an element."""
    return int.from_bytes(bytes([flag]) * itemsize, "little")


class Storage:
    """One allocation; it lives until nothing refers to it.

    Attributes:
        place: its name in traces: by when it was made, or the input's.
        is_input: whether it is an argument of the kernel, which must stay as it is.
        data: the bytes, viewed as the allocation's shape and dtype.
        marks: of the same shape, flags per byte.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, buffer: str, name: str, core: Core | None
    ) -> None:
        self.buffer = buffer
        self.name = name
        self.core = core
        self.scope: Scope | None = core.scope if core is not None else None
        self.place = core.scope.next_place() if core is not None else name
        self.is_input = core is None
        self.sbuf_bytes = self.psum_banks = 0
        require(all(size > 0 for size in shape), f"{name}: no dimension is empty, found {shape}.")
        if buffer != SHARED_HBM:
            self._take(shape, dtype)
        num_bytes = math.prod(shape) * dtype.itemsize
        # While a kernel is only traced, nothing is read: what is there does not matter.
        is_dry = core is not None and core.is_dry
        contents = (
            np.empty(num_bytes, np.uint8) if is_dry else np.full(num_bytes, _POISON, np.uint8)
        )
        self.data: NDArray = contents.view(dtype).reshape(shape)
        marks = np.zeros(num_bytes, np.uint8)
        self.marks: NDArray = marks.view(f"u{dtype.itemsize}").reshape(shape)

    def _take(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        assert self.core is not None
        require(len(shape) >= 2, f"{self.name}: on-chip tensors have at least two dimensions.")
        require(
            0 < shape[0] <= trainium2.NUM_PARTITIONS,
            f"{self.name}: {shape[0]} partitions, of {trainium2.NUM_PARTITIONS}.",
        )
        per_partition = math.prod(shape[1:]) * dtype.itemsize
        if self.buffer == SBUF:
            self.core.take_sbuf(per_partition)
            self.sbuf_bytes = per_partition
        else:
            num_banks = -(-per_partition // trainium2.PSUM_BANK_BYTES)
            self.core.take_psum(num_banks)
            self.psum_banks = num_banks

    def __del__(self) -> None:
        if self.core is not None:
            self.core.release(self.sbuf_bytes, self.psum_banks)

    def fill(self, values: NDArray) -> None:
        """Contents given from outside the kernel."""
        self.data[...] = values
        self.marks[...] = pattern(WRITTEN, self.data.itemsize)

    def check_usable(self, core: Core) -> None:
        if self.scope is None:
            return
        require(
            self.scope.is_alive,
            f"{self.name} was made in a loop body and is used outside it, or in another trip.",
        )
        require(
            self.buffer == SHARED_HBM or self.core is core,
            f"{self.name} belongs to another core's memory.",
        )
        require(
            self.buffer != PSUM or self.scope is core.scope,
            f"{self.name}: PSUM used in a loop body must be allocated in that body.",
        )
