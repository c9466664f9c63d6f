"""fp8 linear layers on CPUs without AMX: vLLM's kernel computes them, but it is refused there."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_moe_ep.adapters.vllm import choice, cures
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128

_MAX_ERROR = 0.02
"""rel-L2 of the products; one block of six at twice its scale would make 0.4."""


def with_cure(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the kernel's own check pass where the cure is on."""

    @functools.wraps(original)
    def is_supported(*args: Any, **kwargs: Any) -> Any:
        if cures.is_active(CURE) and choice.is_current():
            return True, None
        return original(*args, **kwargs)

    return is_supported


def is_needed(quant_config: Any) -> bool:
    """Whether linear layers of this quantisation find no kernel without the cure."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    if not isinstance(quant_config, Fp8Config) or quant_config.weight_block_size is None:
        return False
    return not CPUFp8BlockScaledMMKernel.is_supported()[0]


def _failure() -> str | None:
    """Products of one row and of many, with the weight packed and as loaded."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the CPU has no AVX512-BF16"
    if not hasattr(torch.ops._C, "fp8_scaled_mm_cpu"):
        return "this build of vLLM has no fp8_scaled_mm_cpu"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 384, generator=generator)
    stored = quantise(weight, FP8_128X128)
    exact = dequantise(stored)
    for num_rows in (1, 40):
        rows = torch.randn(num_rows, 384, generator=generator).to(torch.bfloat16)
        for is_packed in (True, False):
            actual = _product(rows, stored.values, stored.scale, is_packed)
            expected = rows.float() @ exact.T
            error = float((actual.float() - expected).norm() / expected.norm())
            # Negated, so that a NaN fails.
            if not error <= _MAX_ERROR:
                return f"its fp8 products of {num_rows} rows are off by {error:.3g}"
    return None


def _product(rows: Tensor, values: Tensor, scale: Tensor, is_packed: bool) -> Tensor:
    weight = torch.ops._C.convert_weight_packed(values) if is_packed else values
    result: Tensor = torch.ops._C.fp8_scaled_mm_cpu(
        rows, weight, scale, [128, 128], None, rows.dtype, is_packed
    )
    return result


CURE = cures.Cure(
    name="fp8 linear layers",
    gap="its linear layers are fp8, for which vLLM's CPU kernel asks for AMX",
    remedy="Serve a bf16 checkpoint, or use a CPU with AMX.",
    failure=_failure,
)
