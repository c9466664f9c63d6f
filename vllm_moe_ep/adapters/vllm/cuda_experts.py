"""Build the layer of a CUDA rank over the weights that vLLM loaded."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.logger import init_logger

from vllm_moe_ep.adapters.vllm import engine_config
from vllm_moe_ep.adapters.vllm.cuda_warmup import warm_up
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.deepgemm.blackwell_experts import BlackwellExperts
from vllm_moe_ep.deepgemm.experts_by_size import ExpertsBySize
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.deepgemm.path_table import (
    FEW_ROWS_BELOW,
    TABLE,
    Entry,
    only,
    with_alignment,
    with_few_rows,
)
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.deepgemm.symbols import SET_ALIGNMENT
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight, prepare_fp8_weight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.device_experts import DeviceExperts
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.stages import RoutedTokens

logger = init_logger("vllm.vllm_moe_ep")


def build_layer(layer: Any, config: MoEConfig) -> EPLayer:
    """The layer over the weights of `layer`, held by reference, and compiled for its sizes.

    Args:
        layer: our `RoutedExperts` with its weights loaded.
        config: its shape.

    Raises:
        UnsupportedError: a format or size that the kernels do not take.
        ValueError: damaged scales; names the tensor.
    """
    weights = loaded_weights(layer)
    entries = entries_for(layer, weights)
    experts = ExpertsBySize(
        entries,
        config.num_experts,
        _deepgemm_experts(layer, weights),
        _engine_experts(layer, weights, entries),
        _few_row_experts(layer, weights, entries, config.num_experts),
    )
    ep_config = engine_config.ep_config_of(layer.settings)
    built = EPLayer(config, DeviceExperts(experts), layer.collectives, ep_config)
    logger.info_once("static-ep: experts by size: %s", _described(entries))
    token_size = layer.collectives.token_size
    warm_up(experts, config, token_size, layer.capture_sizes, entries, weights)
    return built


def loaded_weights(layer: Any) -> HopperWeights:
    """vLLM's parameters as our weights, without a copy."""
    if not hasattr(layer, "w13_weight_scale_inv"):
        return HopperWeights(layer.w13_weight.data, layer.w2_weight.data)
    return HopperWeights(_scaled(layer, "w13_weight"), _scaled(layer, "w2_weight"))


def _scaled(layer: Any, parameter: str) -> ScaledWeight:
    name = f"{layer.layer_name}.{parameter}"
    values: Tensor = getattr(layer, parameter).data
    scale: Tensor = getattr(layer, f"{parameter}_scale_inv").data
    if layer.has_dummy_weights:
        # vLLM's random numbers: half of its scales are negative, which no checkpoint has.
        return ScaledWeight(values, scale, "float32", 128)
    return prepare_fp8_weight(name, values, scale, (128, 128), 9)


def entries_for(layer: Any, weights: HopperWeights) -> tuple[Entry, ...]:
    """The table of this format under the settings, as far as the library allows.

    Raises:
        UnsupportedError: the engine's kernel alone is asked for, on a layer with a clamp; or the
            few-row kernels on another device than SM90.
    """
    form = "fp8" if weights.is_fp8 else "bf16"
    entries = TABLE[form]
    path = layer.settings.cuda_path
    bundle = deep_gemm("fp8_block" if weights.is_fp8 else "bf16")
    if path == "few_rows":
        if bundle.capability[0] != 9:
            raise UnsupportedError(
                "VLLM_MOE_EP_CUDA_PATH=few_rows is for Hopper (SM90), found "
                f"SM{bundle.capability[0]}{bundle.capability[1]}: use auto."
            )
        entries = with_few_rows(FEW_ROWS_BELOW[form], entries)
    elif layer.swiglu_limit is not None:
        # The engine's kernel of small steps is told of no clamp.
        if path == "engine":
            raise UnsupportedError(
                f"VLLM_MOE_EP_CUDA_PATH=engine: {layer.layer_name} clamps its activations "
                f"at {layer.swiglu_limit}, which static-ep does on DeepGEMM only: use auto or "
                "deepgemm."
            )
        entries = only("deepgemm", entries)
    elif path != "auto":
        entries = only(path, entries)
    has_choice = bundle.capability[0] == 9 and SET_ALIGNMENT in bundle.functions
    return entries if has_choice else with_alignment(entries, bundle.alignment)


def _deepgemm_experts(layer: Any, weights: HopperWeights) -> Callable[[RoutedTokens, int], Tensor]:
    bundle = deep_gemm("fp8_block" if weights.is_fp8 else "bf16")
    if bundle.capability[0] == 10:
        return BlackwellExperts(bundle, weights, layer._expert_map, layer.swiglu_limit)
    kernels = load_row_kernels("triton_kernels")
    return HopperExperts(
        bundle,
        weights,
        kernels,
        layer._expert_map,
        layer.swiglu_limit,
        layer.settings.cuda_pass_rows,
    )


def _engine_experts(
    layer: Any, weights: HopperWeights, entries: tuple[Entry, ...]
) -> Callable[[RoutedTokens], Tensor] | None:
    if all(entry.path != "engine" for entry in entries):
        return None
    from vllm_moe_ep.adapters.vllm.engine_experts import EngineExperts

    return EngineExperts(layer.moe_config, weights, layer._expert_map)


def _few_row_experts(
    layer: Any, weights: HopperWeights, entries: tuple[Entry, ...], num_experts: int
) -> Callable[[RoutedTokens], Tensor] | None:
    if all(entry.path != "few_rows" for entry in entries):
        return None
    kernels = load_few_row_kernels("triton_kernels")
    return FewRowExperts(weights, kernels, num_experts, layer._expert_map, layer.swiglu_limit)


def _described(entries: tuple[Entry, ...]) -> str:
    names = {
        "engine": "vLLM's Triton kernel",
        "few_rows": "kernels for few rows",
        "deepgemm": "DeepGEMM",
    }
    return "; ".join(
        f"{names[entry.path]}{f' in tiles of {entry.alignment} rows' if entry.alignment else ''} "
        f"from {entry.min_rows_per_expert:g} rows per expert"
        for entry in entries
    )
