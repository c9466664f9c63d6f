"""Tensors of a kernel: views of storage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from vllm_moe_ep_kernels.nki_emulator import core as cores
from vllm_moe_ep_kernels.nki_emulator.registers import VirtualRegister
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError, require
from vllm_moe_ep_kernels.nki_emulator.storage import READ, SHARED_HBM, WRITTEN, Storage, pattern
from vllm_moe_ep_kernels.nki_emulator.trace import View


class Tensor:
    """A view of one allocation. On chip the first dimension is the partitions."""

    def __init__(
        self,
        storage: Storage,
        data: NDArray,
        marks: NDArray,
        chosen_by: str = "",
        dynamic_bytes: int = 0,
    ) -> None:
        self.storage = storage
        self.data = data
        self.marks = marks
        # Of a dynamic address: what it is made with, and how far that leads in this run.
        self.chosen_by = chosen_by
        self.dynamic_bytes = dynamic_bytes

    @classmethod
    def of(cls, storage: Storage) -> "Tensor":
        return cls(storage, storage.data, storage.marks)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def buffer(self) -> str:
        return self.storage.buffer

    @property
    def is_on_chip(self) -> bool:
        return self.buffer != SHARED_HBM

    @property
    def is_dynamic(self) -> bool:
        return self.chosen_by != ""

    def traced(self) -> View:
        """As an operand in a trace."""
        start = _address(self.data) - _address(self.storage.data) - self.dynamic_bytes
        return View(
            self.storage.place,
            str(self.dtype),
            self.shape,
            self.data.strides,
            self.chosen_by,
            not self.is_on_chip,
            start,
        )

    def __bool__(self) -> bool:
        raise NkiRuleError("A tensor has no truth value: there is no branch on data.")

    def __getitem__(self, index: Any) -> "Tensor":
        parts = list(index) if isinstance(index, tuple) else [index]
        if self.is_on_chip and isinstance(parts[0], int):
            parts[0] = slice(parts[0], parts[0] + 1)
        require(
            len(parts) <= self.data.ndim,
            f"{self.storage.name}: {len(parts)} indices of {self.data.ndim} dimensions.",
        )
        for part, size in zip(parts, self.shape, strict=False):
            _check_bounds(part, size)
        view = self._map(lambda array: array[tuple(parts)])
        return view.expand_dim(1) if self.is_on_chip and view.data.ndim == 1 else view

    def reshape(self, shape: tuple[int, ...]) -> "Tensor":
        require(
            not self.is_on_chip or shape[0] == self.shape[0],
            f"{self.storage.name}: partitions cannot be split or merged.",
        )
        return self._map(lambda array: array.reshape(shape, copy=False))

    def view(self, dtype: np.dtype) -> "Tensor":
        require(not self.is_dynamic, "view() after a dynamic address is not allowed.")
        marks = self.marks.view(f"u{dtype.itemsize}")
        return Tensor(self.storage, self.data.view(dtype), marks)

    def permute(self, dims: Sequence[int]) -> "Tensor":
        self._keep_partitions(dims[0] == 0)
        return self._map(lambda array: array.transpose(dims))

    def expand_dim(self, dim: int) -> "Tensor":
        self._keep_partitions(dim > 0)
        return self._map(lambda array: np.expand_dims(array, dim))

    def broadcast(self, dim: int, size: int) -> "Tensor":
        self._keep_partitions(dim > 0)
        require(self.shape[dim] == 1, f"broadcast() of a dimension of size {self.shape[dim]}.")
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return self._map(lambda array: np.broadcast_to(array, shape))

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int = 0,
        scalar_offset: "Tensor | VirtualRegister | None" = None,
        indirect_dim: int = 0,
    ) -> "Tensor":
        """[stride, count] pairs in elements of the base tensor, of HBM alone."""
        require(not self.is_on_chip, "ap() is emulated for HBM tensors alone.")
        base, marks = self.storage.data.reshape(-1), self.storage.marks.reshape(-1)
        require(
            all(stride >= 0 and count > 0 for stride, count in pattern),
            f"{self.storage.name}: a pattern has strides of 0 or more and counts of 1 or more, "
            f"found {[list(pair) for pair in pattern]}.",
        )
        chosen_by, shift = "", 0
        if scalar_offset is not None:
            chosen_by, shift = self._dynamic_offset(scalar_offset, indirect_dim)
            offset += shift
        last = offset + sum(stride * (count - 1) for stride, count in pattern)
        require(
            0 <= offset and last < base.size,
            f"{self.storage.name}: elements {offset} to {last} of {base.size}.",
        )
        shape = tuple(count for _, count in pattern)
        strides = tuple(stride * base.itemsize for stride, _ in pattern)
        return Tensor(
            self.storage,
            as_strided(base[offset:], shape, strides),
            as_strided(marks[offset:], shape, strides),
            chosen_by,
            shift * base.itemsize,
        )

    def _dynamic_offset(self, source: "Tensor | VirtualRegister", dim: int) -> tuple[str, int]:
        """What chooses an entry of a dimension, by its name, and how many elements it skips."""
        shape = self.storage.data.shape
        name, number = scalar_value(source)
        require(
            0 <= number < shape[dim],
            f"{self.storage.name}: dynamic index {number} of {shape[dim]}.",
        )
        return name, number * int(np.prod(shape[dim + 1 :]))

    def check_writable(self) -> None:
        """That an instruction may have it as its result."""
        require(
            not self.storage.is_input,
            f"{self.storage.name} is an input of the kernel, which must not be written.",
        )
        require(self.data.flags.writeable, f"{self.storage.name}: a broadcast view is written.")

    def read(self) -> NDArray:
        """The contents, for an instruction's operand."""
        written = pattern(WRITTEN, self.marks.itemsize)
        require(
            bool((self.marks & written == written).all()),
            f"{self.storage.name} is read where nothing was written.",
        )
        return self.data

    def write(self, values: NDArray, flags: int = WRITTEN) -> None:
        """The contents and their marks, for an instruction's result."""
        self.data[...] = values
        self.marks[...] = pattern(flags, self.marks.itemsize)

    def mark_read(self) -> None:
        # Through the strides: a broadcast view is marked more than once.
        marks = as_strided(self.marks, self.marks.shape, self.marks.strides, writeable=True)
        marks |= np.array(pattern(READ, marks.itemsize), marks.dtype)

    def _map(self, change: Any) -> "Tensor":
        try:
            data, marks = change(self.data), change(self.marks)
        except ValueError as error:
            raise NkiRuleError(f"{self.storage.name}: no such view without a copy.") from error
        return Tensor(self.storage, data, marks, self.chosen_by, self.dynamic_bytes)

    def _keep_partitions(self, is_kept: bool) -> None:
        require(
            is_kept or not self.is_on_chip,
            f"{self.storage.name}: partitions cannot be permuted, split or broadcast.",
        )


def scalar_value(source: "Tensor | VirtualRegister") -> tuple[str, int]:
    """Name and number of a register, or of an on-chip [1, 1] int32 or uint32 tensor.

    The number is 0 while instructions are only traced.
    """
    if isinstance(source, VirtualRegister):
        return source.place, source.number()
    require(
        source.shape == (1, 1) and source.dtype in (np.int32, np.uint32),
        f"A dynamic address needs a (1, 1) int32 or uint32 tensor, found {source.shape} "
        f"{source.dtype}.",
    )
    core = cores.current()
    source.storage.check_usable(core)
    view = source.traced()
    return f"{view.place}[{view.offset}]", 0 if core.is_dry else int(source.read()[0, 0])


def _check_bounds(part: Any, size: int) -> None:
    if isinstance(part, slice):
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        require(
            -size <= start < size and -size <= stop <= size and (part.step or 1) > 0,
            f"A slice from {start} to {stop} of a dimension of {size}.",
        )
        require(
            start % size < (stop + size if stop < 0 else stop),
            f"An empty slice, from {start} to {stop} of a dimension of {size}.",
        )
        return
    require(
        isinstance(part, int) and not isinstance(part, bool),
        f"{part!r} is no index of the emulated subset: an int or a slice.",
    )
    require(-size <= part < size, f"Index {part} of a dimension of {size}.")


def _address(array: NDArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
