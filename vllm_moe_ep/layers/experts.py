"""Choice of the expert strategy of a step."""

from collections.abc import Callable

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.dense import dense_experts, gated_experts
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.grouped import grouped_experts
from vllm_moe_ep.layers.ragged import ragged_experts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens

# Row counts of the grouped products are multiples of this.
CAPACITY_STEP = 16
_CAPACITY_FACTOR = 4

_STRATEGIES: dict[str, Callable[[RoutedTokens, ExpertShard, EPConfig], ExpertOutput]] = {
    "dense": lambda tokens, shard, _: dense_experts(tokens, shard),
    "gated": lambda tokens, shard, config: gated_experts(tokens, shard, config.forced_gate),
    "grouped": lambda tokens, shard, config: grouped_experts(
        tokens, shard, _capacity(config, tokens, shard.num_experts)
    ),
    "ragged": lambda tokens, shard, _: ragged_experts(tokens, shard),
}


def automatic_capacity(num_rows: int, top_k: int, num_experts: int) -> int:
    """Rows per expert where none were set, from what every rank knows.

    Four times an expert's even share of the routed rows: routers that are trained to balance
    their experts stay below that, and an overflow costs a whole dense rerun.
    """
    rows = -(-_CAPACITY_FACTOR * num_rows * top_k // num_experts)
    return -(-rows // CAPACITY_STEP) * CAPACITY_STEP


def choose_strategy(ep_config: EPConfig, num_rows: int, top_k: int, num_experts: int) -> str:
    """Name of the strategy for this many gathered rows: equal on every rank, as the rows are."""
    capacity = ep_config.expert_capacity or automatic_capacity(num_rows, top_k, num_experts)
    if ep_config.experts == "grouped":
        return "grouped" if capacity < num_rows else "dense"
    if ep_config.experts != "auto":
        return ep_config.experts
    if ep_config.host_mode:
        return "ragged"
    if num_rows <= ep_config.max_gated_rows:
        return "gated"
    # Grouping moves rows about, and may have to be done again: it has to save more than a little.
    limit = num_rows if ep_config.expert_capacity else num_rows // 2 + 1
    return "grouped" if capacity < limit else "dense"


def _capacity(ep_config: EPConfig, tokens: RoutedTokens, num_experts: int) -> int:
    num_rows, top_k = tokens.topk_ids.shape
    return ep_config.expert_capacity or automatic_capacity(num_rows, top_k, num_experts)


def run_experts(
    strategy: str, tokens: RoutedTokens, shard: ExpertShard, ep_config: EPConfig
) -> ExpertOutput:
    """This rank's experts on all gathered rows, by the named strategy."""
    return _STRATEGIES[strategy](tokens, shard, ep_config)
