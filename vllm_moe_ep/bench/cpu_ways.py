"""On CPU: the layer as it is served there, and its other ways."""

import importlib.util
from typing import Any

from vllm_moe_ep.bench.way import OURS, Way, Ways
from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.layers.expert_weights import ExpertLinears, FloatExperts
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement

FORMATS = ("bf16", "fp32")
_NO_KERNEL = "vLLM's grouped CPU kernel is not to be had for this layer"


def cpu_ways(config: MoEConfig, weights: HopperWeights, with_all: bool) -> Ways:
    """Ours: by vLLM's grouped CPU kernel where it takes the weights, as when serving.

    Args:
        with_all: our own products by each strategy, too.
    """
    plain = FloatExperts(*weights.tensors, config)
    packed = _packed(config, weights)
    by_name: dict[str, Way] = {OURS: _way(config, packed or plain, "auto")}
    if with_all:
        for strategy in ("ragged", "grouped", "dense"):
            by_name[strategy] = _way(config, plain, strategy)
    missing = {} if packed else {"vLLM's kernel": f"{_NO_KERNEL}; ours uses its own products"}
    name = "vllm_kernel" if packed else "ragged"
    return Ways(by_name, (), missing, lambda num_tokens: name)


def _packed(config: MoEConfig, weights: HopperWeights) -> Any | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm_moe_ep.adapters.vllm import lone_layer

    return lone_layer.packed_cpu_experts(config, weights)


def _way(config: MoEConfig, linears: ExpertLinears, strategy: str) -> Way:
    layer = strategy_layer(
        config,
        ExpertPlacement.linear(config.num_experts, 1).local(0),
        linears,
        SingleProcess(),
        EPConfig(experts=strategy),
    )
    return lambda tokens: layer(
        tokens.hidden_states,
        tokens.topk_ids,
        tokens.topk_weights,
        capacity=tokens.hidden_states.shape[0],
    )
