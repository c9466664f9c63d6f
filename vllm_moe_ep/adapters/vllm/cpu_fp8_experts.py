"""Local fp8 experts by vLLM's grouped CPU kernel, which packs the weights for itself.

It multiplies bf16 rows with weights that it dequantises on the way: six (64 rows) to forty times
(one row) faster than tiles dequantised in memory, on one core and 8 experts of 1024 x 2048. It has
no clamp of the kind that DeepSeek-V4 asks for, neither for fp8 nor for FP4.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm._custom_ops import CPUQuantMethod, fused_experts_cpu
from vllm.model_executor.utils import replace_parameter

from vllm_moe_ep.adapters.vllm.cpu_experts import max_aliased_rows
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128

_BLOCK = 128
_MAX_ERROR = 0.02
"""rel-L2 of the test's outputs; one wrong block of scales would make over 0.1."""


class PackedFp8Experts:
    """Expert weights in the kernel's packed order, see `pack`; scales as loaded.

    Attributes as in `layers.expert_weights.ExpertLinears`.
    """

    def __init__(self, layer: Any, config: MoEConfig) -> None:
        self._layer = layer
        self.max_aliased_rows = max_aliased_rows(config)
        self.num_slots: int = layer.w13_weight.shape[0]
        self.device = layer.w13_weight.device
        self.hidden_dtype = self.activation_dtype = torch.bfloat16

    def fused(self, rows: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """As `layers.expert_weights.FusedExperts.fused`."""
        layer = self._layer
        scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        return _run(rows, slots, weights, (layer.w13_weight, layer.w2_weight), scales)

    def gate_up(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        raise NotImplementedError(_WHOLE_EXPERTS_ONLY)

    def down(self, slot: int, rows: Tensor, flag: Tensor | None = None) -> Tensor:
        raise NotImplementedError(_WHOLE_EXPERTS_ONLY)


_WHOLE_EXPERTS_ONLY = "The packed CPU kernel computes whole experts: use the ragged strategy."


def pack(layer: Any) -> None:
    """Bring the layer's loaded weights into the kernel's order, in their place."""
    for name in ("w13_weight", "w2_weight"):
        replace_parameter(layer, name, torch.ops._C.convert_weight_packed(getattr(layer, name)))


def applies(config: MoEConfig, experts: str, hidden_dtype: torch.dtype) -> bool:
    """Whether the kernel computes this layer, and right on this machine.

    Args:
        config: the layer's shape.
        experts: the setting of that name.
        hidden_dtype: of the hidden states.
    """
    if experts not in ("auto", "ragged") or config.swiglu_limit is not None:
        return False
    if hidden_dtype is not torch.bfloat16:
        return False
    if config.hidden_size % _BLOCK or config.moe_intermediate_size % _BLOCK:
        return False
    return failure() is None


@functools.cache
def failure() -> str | None:
    """Runs two small experts; None where the kernel is right, else what is wrong."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the CPU has no AVX512-BF16"
    if not hasattr(torch.ops._C, "fused_experts_cpu"):
        return "this build of vLLM has no fused_experts_cpu"
    # Where there is AMX the kernel may use it, which kills a process that has not asked for it.
    torch.cpu._init_amx()
    generator = torch.Generator().manual_seed(0)
    w13 = quantise(torch.randn(2, 256, 256, generator=generator), FP8_128X128)
    w2 = quantise(torch.randn(2, 256, 128, generator=generator), FP8_128X128)
    packed = tuple(torch.ops._C.convert_weight_packed(weight.values) for weight in (w13, w2))
    for num_rows in (1, 40):
        rows = torch.randn(num_rows, 256, generator=generator).to(torch.bfloat16)
        slots = torch.arange(num_rows, dtype=torch.int32)[:, None] % 2
        weights = torch.rand(num_rows, 1, generator=generator)
        actual = _run(rows, slots, weights, (packed[0], packed[1]), (w13.scale, w2.scale))
        gate, up = _products(rows.float(), dequantise(w13), slots).chunk(2, dim=1)
        expected = weights * _products(F.silu(gate) * up, dequantise(w2), slots)
        error = float((actual.float() - expected).norm() / expected.norm())
        # Negated, so that a NaN fails.
        if not error <= _MAX_ERROR:
            return f"its fp8 experts on {num_rows} rows are off by {error:.3g}"
    return None


def _products(rows: Tensor, matrices: Tensor, slots: Tensor) -> Tensor:
    return torch.einsum("rk,rnk->rn", rows, matrices[slots[:, 0].long()])


def _run(
    rows: Tensor,
    slots: Tensor,
    weights: Tensor,
    packed: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
) -> Tensor:
    output = torch.empty_like(rows)
    no_zeros = no_bias = no_limit = (None, None)
    fused_experts_cpu(
        output,
        rows,
        *packed,
        weights,
        slots,
        CPUQuantMethod.FP8_W8A16,
        *scales,
        *no_zeros,
        [_BLOCK, _BLOCK],
        *no_bias,
        *no_limit,
        True,
    )
    return output
