"""Choice of the expert strategy of a step."""

from collections.abc import Callable

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.dense import dense_experts, gated_experts
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.grouped import grouped_experts
from vllm_moe_ep.layers.ragged import ragged_experts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens

_STRATEGIES: dict[str, Callable[[RoutedTokens, ExpertShard, EPConfig], ExpertOutput]] = {
    "dense": lambda tokens, shard, _: dense_experts(tokens, shard),
    "gated": lambda tokens, shard, config: gated_experts(tokens, shard, config.forced_gate),
    "grouped": lambda tokens, shard, config: grouped_experts(tokens, shard, config.expert_capacity),
    "ragged": lambda tokens, shard, _: ragged_experts(tokens, shard),
}


def choose_strategy(ep_config: EPConfig, num_rows: int) -> str:
    """Name of the strategy for this many gathered rows: equal on every rank, as the rows are."""
    may_group = 0 < ep_config.expert_capacity < num_rows
    if ep_config.experts == "grouped":
        return "grouped" if may_group else "dense"
    if ep_config.experts != "auto":
        return ep_config.experts
    if ep_config.host_mode:
        return "ragged"
    if num_rows <= ep_config.max_gated_rows:
        return "gated"
    return "grouped" if may_group else "dense"


def run_experts(
    strategy: str, tokens: RoutedTokens, shard: ExpertShard, ep_config: EPConfig
) -> ExpertOutput:
    """This rank's experts on all gathered rows, by the named strategy."""
    return _STRATEGIES[strategy](tokens, shard, ep_config)
