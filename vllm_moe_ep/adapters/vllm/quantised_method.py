"""Quantised expert weights, taken as vLLM loads them: codes and scales.

Activations stay as they are, as in vLLM's own CPU kernels for these formats. Where vLLM's grouped
kernel computes a layer right, the weights are packed for it, in their place. Elsewhere they stay
raw, and are dequantised a tile at a time whenever they are used: a bf16 copy made once at load
would take two (fp8) to four times (FP4) the memory of the weights.
"""

from typing import Any

from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from vllm_moe_ep.adapters.vllm import cpu_fp8_experts
from vllm_moe_ep.adapters.vllm.expert_format import ExpertFormat
from vllm_moe_ep.adapters.vllm.quant_method import StaticEPMethod, logger
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.layers.expert_weights import ExpertLinears
from vllm_moe_ep.layers.quantised_experts import BlockFp8Experts, Fp4Experts


class StaticEPFp8Method(StaticEPMethod):
    """fp8 e4m3 weights in 128 x 128 blocks with fp32 scales."""

    parameter_names = (
        "w13_weight",
        "w13_weight_scale_inv",
        "w2_weight",
        "w2_weight_scale_inv",
    )

    def __init__(self, moe_config: Any, quant_config: Any) -> None:
        super().__init__(moe_config)
        # What the borrowed registration reads.
        self.quant_config = quant_config
        self.weight_block_size = self.moe_block_shape = quant_config.weight_block_size
        self.weight_scale_refine = None
        self.weight_scale_name = "weight_scale_inv"
        self.block_quant = True
        self._is_packed = False

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register the weights in float8_e4m3fn and `w13/w2_weight_scale_inv` in fp32.

        A checkpoint's UE8M0 scales are loaded as numbers, which fp32 holds exactly.
        """
        Fp8MoEMethod.create_weights(self, layer, *args, **kwargs)  # type: ignore[arg-type]

    def pack_weights(self, layer: Any) -> None:
        """For vLLM's grouped kernel where that applies; else they stay as loaded."""
        dtype = self.moe.in_dtype
        self._is_packed = cpu_fp8_experts.applies(layer.moe_shape, layer.settings.experts, dtype)
        if self._is_packed:
            logger.info_once("static-ep: fp8 experts by vLLM's grouped CPU kernel")
            cpu_fp8_experts.pack(layer)
        else:
            logger.info_once("static-ep: fp8 experts dequantised a tile at a time")

    def expert_weights(self, layer: Any, config: MoEConfig) -> ExpertLinears:
        if self._is_packed:
            return cpu_fp8_experts.PackedFp8Experts(layer, config)
        return BlockFp8Experts(
            layer.w13_weight,
            layer.w13_weight_scale_inv,
            layer.w2_weight,
            layer.w2_weight_scale_inv,
            config,
            hidden_dtype=self.moe.in_dtype,
        )


class StaticEPFp4Method(StaticEPMethod):
    """FP4 e2m1 weights, two a byte, with a UE8M0 scale for each 32 along a row."""

    parameter_names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Register weights and `w13/w2_weight_scale` as uint8: two codes, one exponent byte."""
        Mxfp4MoEMethod.create_weights(self, layer, *args, **kwargs)  # type: ignore[arg-type]

    def pack_weights(self, layer: Any) -> None:
        """They stay as loaded: vLLM's grouped kernel has no clamp that DeepSeek-V4 could use."""
        logger.info_once("static-ep: FP4 experts dequantised a tile at a time")

    def expert_weights(self, layer: Any, config: MoEConfig) -> ExpertLinears:
        return Fp4Experts(
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            config,
            hidden_dtype=self.moe.in_dtype,
        )


def method_for(found: ExpertFormat, moe_config: Any, quant_config: Any) -> StaticEPMethod:
    """The method for experts of a format that is not refused."""
    if found.kind == "fp8":
        return StaticEPFp8Method(moe_config, quant_config)
    if found.kind == "fp4":
        return StaticEPFp4Method(moe_config)
    return StaticEPMethod(moe_config)
