"""The narrow interface between the layer and a device's linear kernels."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A stack of quantised matrices as one implementation keeps it.

    Attributes:
        codes: the numbers; their layout is the implementation's own.
        scales: their scales, likewise.
        num_experts, n, k: how many matrices, and the size of each.
        block_size: (block_n, block_k) of the scales before the weight was prepared.
        is_fp4: packed FP4.
        is_interleaved: whether blocks of gate and up rows alternate.
        num_inexact: numbers that preparing the weight changed.
    """

    codes: Tensor
    scales: Tensor
    num_experts: int
    n: int
    k: int
    block_size: tuple[int, int]
    is_fp4: bool
    is_interleaved: bool = False
    num_inexact: int = 0


class Linears(Protocol):
    """Products of rows, cast to fp8 1x32 with power-of-two scales, with quantised weights.

    Every result is fp32. Rows may be bf16, fp16 or fp32.
    """

    def has_kernel(self, n: int, k: int, block_size: tuple[int, int], is_fp4: bool) -> bool:
        """Whether this implementation takes such a weight."""
        ...

    def prepare(
        self,
        values: Tensor,
        scale: Tensor,
        block_size: tuple[int, int],
        is_gate_up: bool = False,
        name: str = "a weight",
    ) -> LinearWeight:
        """Once at load: a checkpoint's weight to the implementation's own form.

        Args:
            values: float8_e4m3fn [num_experts, n, k], or uint8 [num_experts, n, k / 2] with two
                FP4 codes a byte, the low nibble first.
            scale: [num_experts, ceil(n / block_n), ceil(k / block_k)], fp32 or UE8M0.
            block_size: (block_n, block_k).
            is_gate_up: n is gate rows above as many up rows.
            name: of the weight, for errors.

        Raises:
            ValueError: there is no kernel for it, or a scale is no usable number.
        """
        ...

    def linear(self, rows: Tensor, weight: LinearWeight, expert: int) -> Tensor:
        """[rows, k] -> [rows, n]."""
        ...

    def linear_gated(self, rows: Tensor, weight: LinearWeight, expert: int, flag: Tensor) -> Tensor:
        """``linear`` where flag (int32 [1, 1]) is not 0, else zeros and the weight is not read."""
        ...

    def linear_raw(self, rows: Tensor, weight: LinearWeight) -> Tensor:
        """``linear`` with a matrix of its own, of no stack: a slice of the shared expert."""
        ...

    def swiglu(self, gate_up: Tensor, row_weight: Tensor, swiglu_limit: float | None) -> Tensor:
        """fp32 [rows, 2 * width] and fp32 [rows] -> fp32 [rows, width]; 0 where the weight is 0."""
        ...
