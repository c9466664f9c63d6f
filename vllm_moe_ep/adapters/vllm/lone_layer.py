"""vLLM's experts outside of an engine: one layer on one rank, for measurements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)

from vllm_moe_ep.adapters.vllm import cpu_experts
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.stages import RoutedTokens

Experts = Callable[[RoutedTokens], Tensor]
VERSION: str = vllm.__version__


@contextmanager
def engine_state(device: torch.device) -> Iterator[None]:
    """What vLLM's kernels take from their process: a configuration, and on CUDA a workspace."""
    with set_current_vllm_config(VllmConfig()):
        if device.type == "cuda":
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(device)
        yield


def release_workspace(device: torch.device) -> None:
    """Drop the memory that vLLM's kernels share and keep; the next call takes it anew."""
    from vllm.v1.worker import workspace

    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(device)


def moe_config_of(config: MoEConfig, dtype: torch.dtype, device: torch.device) -> FusedMoEConfig:
    """vLLM's configuration of the same layer."""
    return FusedMoEConfig(
        num_experts=config.num_experts,
        experts_per_token=config.top_k,
        hidden_dim=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_local_experts=config.num_experts,
        num_logical_experts=config.num_experts,
        activation=MoEActivation.SILU,
        device=device,
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
        max_num_tokens=config.max_num_tokens,
    )


def triton_experts(config: FusedMoEConfig, weights: HopperWeights) -> Experts:
    """vLLM's Triton kernel, which its `auto` takes for fp8 and bf16 on Hopper."""
    from vllm_moe_ep.adapters.vllm.engine_experts import EngineExperts

    return EngineExperts(config, weights, None)


def deep_gemm_experts(config: FusedMoEConfig, weights: HopperWeights) -> Experts:
    """vLLM's own DeepGEMM experts; fp8 only."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
        make_moe_prepare_and_finalize_no_dp_ep,
    )

    assert isinstance(weights.w13, ScaledWeight) and isinstance(weights.w2, ScaledWeight)
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=weights.w13.scale, w2_scale=weights.w2.scale, block_shape=[128, 128]
    )
    kernel = mk.FusedMoEKernel(
        make_moe_prepare_and_finalize_no_dp_ep(False), DeepGemmExperts(config, quant)
    )
    w13, w2 = weights.tensors

    def compute(tokens: RoutedTokens) -> Tensor:
        output = kernel.apply(
            hidden_states=tokens.hidden_states,
            w1=w13,
            w2=w2,
            topk_weights=tokens.topk_weights,
            topk_ids=tokens.topk_ids,
            activation=MoEActivation.SILU,
            global_num_experts=w13.shape[0],
            expert_map=None,
            apply_router_weight_on_input=False,
        )
        assert isinstance(output, Tensor), "nothing asked for a deferred combine"
        return output

    return compute


def packed_cpu_experts(config: MoEConfig, weights: HopperWeights) -> Any | None:
    """The weights packed (a copy) for vLLM's grouped CPU kernel; None where it takes them not."""
    w13, w2 = weights.tensors
    layer = SimpleNamespace(
        w13_weight=w13, w2_weight=w2, moe_config=moe_config_of(config, w13.dtype, w13.device)
    )
    isa = cpu_experts.kernel_isa(layer, config, "auto")
    if isa is None:
        return None
    for name in ("w13_weight", "w2_weight"):
        packed = cpu_experts.cpu_prepack_moe_weight(getattr(layer, name), isa)
        setattr(layer, name, packed)
    layer._parameters = {"w13_weight": layer.w13_weight, "w2_weight": layer.w2_weight}
    return cpu_experts.PackedCpuExperts(layer, isa, config)
