"""Quantised expert weights behind a device's own linear kernels."""

import torch
from torch import Tensor

from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.linears import Linears, LinearWeight


class KernelExperts:
    """The products of ``ExpertLinears`` by a ``Linears``, which casts the rows itself.

    Args:
        linears: the device's kernels.
        w13_weight: [num_slots, 2 * moe_intermediate_size, hidden_size] numbers, gate rows first:
            float8_e4m3fn, or packed FP4 as uint8.
        w13_scale: their scales.
        w2_weight: [num_slots, hidden_size, moe_intermediate_size] numbers.
        w2_scale: their scales.
        config: the layer's shape.
        block_size: (block_n, block_k); block_n divides moe_intermediate_size.
        hidden_dtype: dtype of the hidden states.

    Attributes:
        num_inexact: numbers that preparing the weights changed.

    Raises:
        UnsupportedError: there is no kernel for weights of this size.
        ValueError: a scale is no number that the kernels can use.
    """

    def __init__(
        self,
        linears: Linears,
        w13_weight: Tensor,
        w13_scale: Tensor,
        w2_weight: Tensor,
        w2_scale: Tensor,
        config: MoEConfig,
        block_size: tuple[int, int],
        hidden_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        width, hidden_size = config.moe_intermediate_size, config.hidden_size
        is_fp4 = w13_weight.dtype is torch.uint8
        for n, k in ((2 * width, hidden_size), (hidden_size, width)):
            if width % block_size[0] or not linears.has_kernel(n, k, block_size, is_fp4):
                raise UnsupportedError(
                    f"No kernel for an expert weight of {n} x {k} in blocks of {block_size[0]} x "
                    f"{block_size[1]}; the host path takes it."
                )
        self.linears = linears
        self.w13 = linears.prepare(
            w13_weight, w13_scale, block_size, is_gate_up=True, name="w13_weight"
        )
        self.w2 = linears.prepare(w2_weight, w2_scale, block_size, name="w2_weight")
        self.num_inexact = self.w13.num_inexact + self.w2.num_inexact
        self.num_slots = self.w2.num_experts
        self.device = self.w2.codes.device
        self.hidden_dtype = hidden_dtype
        # Between the products too: rounded to bf16 first, some numbers would be cast to the
        # neighbouring fp8 code.
        self.activation_dtype = torch.float32

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        return self._product(self.w13, slot, rows, flag)

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        return self._product(self.w2, slot, rows, flag)

    def swiglu(self, gate_up: Tensor, row_weight: Tensor, swiglu_limit: float | None) -> Tensor:
        return self.linears.swiglu(gate_up, row_weight, swiglu_limit)

    def _product(
        self, weight: LinearWeight, slot: int, rows: Tensor, flag: Tensor | None
    ) -> Tensor:
        if flag is None:
            return self.linears.linear(rows, weight, slot)
        return self.linears.linear_gated(rows, weight, slot, flag)
