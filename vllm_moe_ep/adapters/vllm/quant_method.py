"""vLLM's view of how expert weights are created and used: raw parameters, our layer."""

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_moe_ep.adapters.vllm import cpu_experts
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.layers.expert_weights import ExpertLinears, FloatExperts

logger = init_logger("vllm.vllm_moe_ep")


class StaticEPMethod(FusedMoEMethodBase):
    """Unquantised expert weights, kept as loaded and computed by the static EP layer."""

    # The runner must not gather tokens itself: the layer does.
    supports_internal_mk = True
    is_monolithic = False

    parameter_names: tuple[str, ...] = ("w13_weight", "w2_weight")
    """The layer's parameters that `expert_weights` holds."""

    _isa: str | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register `w13_weight` [num_local_experts, 2I, H] and `w2_weight` [.., H, I]."""
        # vLLM's own registration; the rest of its class chooses a stock kernel.
        UnquantizedFusedMoEMethod.create_weights(self, layer, *args, **kwargs)  # type: ignore[arg-type]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called after the first load and after each later one."""
        self.pack_weights(layer)
        layer.build_layer()

    def pack_weights(self, layer: Any) -> None:
        """Bring the loaded weights into the order that they are computed in."""
        isa = cpu_experts.kernel_isa(layer, layer.moe_shape, layer.settings.experts)
        self._isa = isa
        if isa is not None:
            logger.info_once("static-ep: experts by vLLM's grouped CPU kernel (%s)", isa)
            cpu_experts.pack(layer, isa)

    def expert_weights(self, layer: Any, config: MoEConfig) -> ExpertLinears:
        """The layer's parameters, held by reference."""
        if self._isa is not None:
            return cpu_experts.PackedCpuExperts(layer, self._isa, config)
        return FloatExperts(layer.w13_weight, layer.w2_weight, config)

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
        """Never called: `StaticEPRunner` hands the step to the layer itself."""
        raise RuntimeError(f"{layer.layer_name} was run by another runner than static-ep's.")
