"""vLLM's own fused Triton experts, for steps that are too small for DeepGEMM."""

import copy
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    make_moe_prepare_and_finalize_no_dp_ep,
)

from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.stages import RoutedTokens


class EngineExperts:
    """Local experts by vLLM's Triton kernel, on the same weights.

    Args:
        moe_config: vLLM's configuration of the layer.
        weights: held by reference; fp8 ones with fp32 scales per 128x128 block.
        expert_map: int32 [num_experts], local id or -1; None where every expert is local.
    """

    def __init__(self, moe_config: Any, weights: HopperWeights, expert_map: Tensor | None) -> None:
        self._w13, self._w2 = weights.tensors
        self._expert_map = None if expert_map is None else _with_entry_for_none(expert_map)
        config = _local_config(moe_config, self._w13.shape[0])
        self._kernel = mk.FusedMoEKernel(
            make_moe_prepare_and_finalize_no_dp_ep(False),
            TritonExperts(config, _quant_config(weights)),
        )

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """bf16 [rows, hidden_size], the weighted sum of the local experts."""
        ids, num_ids = tokens.topk_ids, self._w13.shape[0]
        if self._expert_map is not None:
            num_ids = self._expert_map.shape[0]
            ids = torch.where(ids < 0, num_ids - 1, ids)
        output = self._kernel.apply(
            hidden_states=tokens.hidden_states.contiguous(),
            w1=self._w13,
            w2=self._w2,
            topk_weights=tokens.topk_weights,
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=num_ids,
            expert_map=self._expert_map,
            apply_router_weight_on_input=False,
        )
        assert isinstance(output, Tensor), "nothing asked for a deferred combine"
        return output


def _with_entry_for_none(expert_map: Tensor) -> Tensor:
    """One more id, of no local expert: what padding selects. The kernel knows no negative id."""
    return torch.cat([expert_map, expert_map.new_full((1,), -1)])


def _quant_config(weights: HopperWeights) -> FusedMoEQuantConfig:
    if not weights.is_fp8:
        return FusedMoEQuantConfig.make()
    assert isinstance(weights.w13, ScaledWeight) and isinstance(weights.w2, ScaledWeight)
    return fp8_w8a8_moe_quant_config(
        w1_scale=weights.w13.scale, w2_scale=weights.w2.scale, block_shape=[128, 128]
    )


def _local_config(moe_config: Any, num_local_experts: int) -> Any:
    """A copy of vLLM's `FusedMoEConfig` as of a layer on one rank: we move the tokens."""
    config = copy.copy(moe_config)
    config.num_experts = config.num_local_experts = num_local_experts
    config.num_logical_experts = num_local_experts
    config.moe_parallel_config = FusedMoEParallelConfig.make_no_parallel()
    config.moe_backend = "triton"
    return config
