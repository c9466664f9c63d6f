"""The layer's linears by the NKI kernels."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.linears import LinearWeight
from vllm_moe_ep_kernels.nki.ops import nki_block_linear, nki_swiglu
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, has_span, prepare, why_not


class NkiLinears:
    """``Linears`` on Trainium2, or in its emulator for tensors of the CPU.

    Args:
        num_cores: physical cores of a logical core: 2 for LNC=2.
        device: where prepared weights go.
    """

    def __init__(self, num_cores: int = 2, device: torch.device | str = "cpu") -> None:
        self.num_cores = num_cores
        self.device = torch.device(device)

    def has_kernel(self, n: int, k: int, block_size: tuple[int, int], is_fp4: bool) -> bool:
        fits = why_not(n, k, self.num_cores, is_fp4) is None
        return fits and has_span(k, block_size[1])

    def prepare(
        self,
        values: Tensor,
        scale: Tensor,
        block_size: tuple[int, int],
        is_gate_up: bool = False,
        name: str = "a weight",
    ) -> LinearWeight:
        prepared = self.lay_out(values, scale, block_size, is_interleaved=is_gate_up, name=name)
        return LinearWeight(
            torch.from_numpy(prepared.codes).to(self.device),
            torch.from_numpy(prepared.scales).to(self.device),
            len(prepared.codes),
            prepared.n,
            prepared.k,
            block_size,
            prepared.is_fp4,
            prepared.is_interleaved,
            prepared.num_inexact,
        )

    def lay_out(
        self,
        values: Tensor,
        scale: Tensor,
        block_size: tuple[int, int],
        k_parts: int = 1,
        is_interleaved: bool = False,
        name: str = "a weight",
    ) -> PreparedWeight:
        """``prepare`` of the kernels on tensors of the CPU."""
        is_fp4 = values.dtype is torch.uint8
        scales = scale if scale.dtype is torch.float32 else scale.view(torch.uint8)
        codes = values.contiguous().view(torch.uint8).numpy()
        factors = scales.contiguous().numpy()
        layout = (self.num_cores, k_parts, is_interleaved)
        return prepare(codes, factors, block_size, is_fp4, *layout, name)

    def linear(self, rows: Tensor, weight: LinearWeight, expert: int) -> Tensor:
        return self._product(rows, weight, expert, None)

    def linear_gated(self, rows: Tensor, weight: LinearWeight, expert: int, flag: Tensor) -> Tensor:
        return self._product(rows, weight, expert, flag)

    def linear_raw(self, rows: Tensor, weight: LinearWeight) -> Tensor:
        return self.linear(rows, weight, 0)

    def swiglu(self, gate_up: Tensor, row_weight: Tensor, swiglu_limit: float | None) -> Tensor:
        return nki_swiglu(gate_up, row_weight, swiglu_limit or 0.0, self.num_cores)

    def _product(
        self, rows: Tensor, weight: LinearWeight, expert: int, flag: Tensor | None
    ) -> Tensor:
        static = (expert, weight.n, weight.is_fp4, weight.is_interleaved, self.num_cores)
        return nki_block_linear(rows, weight.codes, weight.scales, flag, *static)
