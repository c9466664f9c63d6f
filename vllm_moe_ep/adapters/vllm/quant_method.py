"""vLLM's view of how expert weights are created and used: raw parameters, our layer."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def format_refusal(quant_config: Any, params_dtype: torch.dtype) -> str | None:
    """Why experts of this format cannot be ours; None if they can."""
    if quant_config is not None:
        return f"its experts are quantised ({quant_config.get_name()}); bf16, fp16 and fp32 work"
    if params_dtype not in _DTYPES:
        return f"its experts are {params_dtype}; bf16, fp16 and fp32 work"
    return None


class StaticEPMethod(FusedMoEMethodBase):
    """Unquantised expert weights, kept as loaded and computed by the static EP layer."""

    # The runner must not gather tokens itself: the layer does.
    supports_internal_mk = True
    is_monolithic = False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register `w13_weight` [num_local_experts, 2I, H] and `w2_weight` [.., H, I]."""
        # vLLM's own registration; the rest of its class chooses a stock kernel.
        UnquantizedFusedMoEMethod.create_weights(self, layer, *args, **kwargs)  # type: ignore[arg-type]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called after the first load and after each later one."""
        layer.build_layer()

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig.make()

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        return layer.routed_sum(x, topk_weights, topk_ids)
