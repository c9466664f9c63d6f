"""Layers for tests, from an oracle fixture."""

from oracle import Fixture

from vllm_moe_ep.collectives import Collectives, SingleProcess
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import FloatExperts
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement, LocalExperts
from vllm_moe_ep.stages import RoutedTokens

STRATEGIES = ["dense", "gated", "grouped", "ragged"]


def config_of(fixture: Fixture, limit: float | None = None, max_num_tokens: int = 512) -> MoEConfig:
    num_experts, hidden_size, width = fixture.w2_weight.shape
    return MoEConfig(
        num_experts=num_experts,
        top_k=fixture.topk_ids.shape[1],
        hidden_size=hidden_size,
        moe_intermediate_size=width,
        max_num_tokens=max_num_tokens,
        swiglu_limit=limit,
    )


def tokens_of(fixture: Fixture) -> RoutedTokens:
    return RoutedTokens(fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)


def local_of(fixture: Fixture, ep_size: int, ep_rank: int) -> LocalExperts:
    return ExpertPlacement.linear(len(fixture.w2_weight), ep_size).local(ep_rank)


def linears_of(fixture: Fixture, local: LocalExperts) -> FloatExperts:
    own = list(local.global_ids)
    return FloatExperts(fixture.w13_weight[own], fixture.w2_weight[own], config_of(fixture))


def shard_of(
    fixture: Fixture, ep_size: int = 1, ep_rank: int = 0, limit: float | None = None
) -> ExpertShard:
    local = local_of(fixture, ep_size, ep_rank)
    return ExpertShard(local, linears_of(fixture, local), limit)


def layer_of(
    fixture: Fixture,
    ep_config: EPConfig | None = None,
    collectives: Collectives | None = None,
    limit: float | None = None,
    max_num_tokens: int = 512,
) -> EPLayer:
    """This rank's layer: linear placement over all ranks of the collectives."""
    ours = collectives or SingleProcess()
    ep_rank = ours.token_rank * ours.replica_size + ours.replica_rank
    local = local_of(fixture, ours.token_size * ours.replica_size, ep_rank)
    config = config_of(fixture, limit, max_num_tokens)
    return strategy_layer(config, local, linears_of(fixture, local), ours, ep_config)
