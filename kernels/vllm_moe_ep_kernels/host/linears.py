"""The layer's linears in torch, with the numbers of a device's fp8 format."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.host.block_linear import block_linear, gated_block_linear
from vllm_moe_ep_kernels.host.quantise_dequantise import quantise_dequantise
from vllm_moe_ep_kernels.host.swiglu import swiglu
from vllm_moe_ep_kernels.linears import LinearWeight

_ACTIVATION_BLOCK = (1, 32)


class HostLinears:
    """``Linears`` on the CPU; weights stay as the checkpoint has them.

    Args:
        max_value: largest number of the activations' fp8 format: 448, or 240 as on Trainium2.
    """

    def __init__(self, max_value: float) -> None:
        self.max_value = max_value

    def has_kernel(self, n: int, k: int, block_size: tuple[int, int], is_fp4: bool) -> bool:
        return True

    def prepare(
        self,
        values: Tensor,
        scale: Tensor,
        block_size: tuple[int, int],
        is_gate_up: bool = False,
        name: str = "a weight",
    ) -> LinearWeight:
        is_fp4 = values.dtype is torch.uint8
        num_experts, n, width = values.shape
        k = width * 2 if is_fp4 else width
        return LinearWeight(values, scale, num_experts, n, k, block_size, is_fp4)

    def linear(self, rows: Tensor, weight: LinearWeight, expert: int) -> Tensor:
        codes, scales = weight.codes[expert], weight.scales[expert]
        return block_linear(self._cast(rows), codes, scales, weight.block_size)

    def linear_gated(self, rows: Tensor, weight: LinearWeight, expert: int, flag: Tensor) -> Tensor:
        codes, scales = weight.codes[expert], weight.scales[expert]
        return gated_block_linear(self._cast(rows), codes, scales, weight.block_size, flag)

    def linear_raw(self, rows: Tensor, weight: LinearWeight) -> Tensor:
        return self.linear(rows, weight, 0)

    def swiglu(self, gate_up: Tensor, row_weight: Tensor, swiglu_limit: float | None) -> Tensor:
        values = swiglu(gate_up, row_weight, swiglu_limit, torch.float32)
        return torch.where(row_weight[:, None] != 0, values, 0.0)

    def _cast(self, rows: Tensor) -> Tensor:
        return quantise_dequantise(rows, _ACTIVATION_BLOCK, self.max_value, True, False)
