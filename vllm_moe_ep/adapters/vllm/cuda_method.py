"""Which expert weights the DeepGEMM layer takes, and how vLLM creates them."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from vllm_moe_ep.adapters.vllm.quant_method import StaticEPMethod
from vllm_moe_ep.adapters.vllm.quantised_method import StaticEPFp8Method
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.envs import Settings
from vllm_moe_ep.hardware import probe

_BLOCK = [128, 128]


def is_chosen(settings: Settings) -> bool:
    """Whether this process's layers run on CUDA."""
    return probe(settings.platform).kind == "cuda"


def is_fp8(quant_config: Any, prefix: str) -> bool:
    """Whether the experts of layer `prefix` are stored in fp8."""
    return isinstance(quant_config, Fp8Config) and not is_layer_skipped(
        prefix=prefix,
        ignored_layers=quant_config.ignored_layers,
        fused_mapping=quant_config.packed_modules_mapping,
    )


def format_refusal(quant_config: Any, params_dtype: torch.dtype, prefix: str) -> str | None:
    """Why experts of this format cannot run on the DeepGEMM layer; None if they can."""
    if params_dtype != torch.bfloat16:
        return f"its activations are {params_dtype}, and DeepGEMM takes bfloat16"
    if quant_config is None:
        return None
    if not isinstance(quant_config, Fp8Config):
        return (
            f"its experts are quantised ({quant_config.get_name()}); the DeepGEMM layer takes "
            "bf16, and fp8 with 128x128 blocks"
        )
    if not is_fp8(quant_config, prefix):
        return None
    if quant_config.store_dtype is not None:
        return f"its experts are stored as {quant_config.store_dtype}, not as fp8"
    if quant_config.weight_block_size != _BLOCK:
        return (
            f"its fp8 experts have scales per {quant_config.weight_block_size or 'tensor'}; the "
            "DeepGEMM layer takes blocks of 128x128"
        )
    if quant_config.activation_scheme != "dynamic":
        return f"its activation scheme is {quant_config.activation_scheme}, not dynamic"
    return None


def make_method(quant_config: Any, moe_config: Any, prefix: str) -> FusedMoEMethodBase:
    """The method of a layer that is not refused. Loads the library, before any weight.

    Raises:
        DeepGemmUnavailableError: the library cannot be used; says what to do.
    """
    if is_fp8(quant_config, prefix):
        deep_gemm("fp8_block")
        return CudaFp8Method(moe_config, quant_config)
    deep_gemm("bf16")
    return CudaMethod(moe_config)


class CudaMethod(StaticEPMethod):
    """bf16 expert weights, kept as loaded and computed by our layer."""

    def pack_weights(self, layer: Any) -> None:
        """They stay as loaded, which is how DeepGEMM and vLLM's Triton kernel take them."""


class CudaFp8Method(CudaMethod, StaticEPFp8Method):
    """fp8 expert weights with block scales, likewise."""
