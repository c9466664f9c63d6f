"""Experts computed one by one, by the strategy that suits a step."""

import logging
from collections.abc import Callable
from functools import cache

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.dense import dense_experts, gated_experts
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import ExpertLinears
from vllm_moe_ep.layers.grouped import grouped_experts
from vllm_moe_ep.layers.ragged import ragged_experts
from vllm_moe_ep.layers.regions import Boundary, no_split
from vllm_moe_ep.layers.row_parts import rows_at_once
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens

logger = logging.getLogger(__name__)

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
    if ep_config.experts not in ("auto", "static"):
        return ep_config.experts
    if ep_config.experts == "auto" and ep_config.host_mode:
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


@cache
def _warn_of_forced_gate(forced_gate: int) -> None:
    """Once per process, not once per layer."""
    logger.warning(
        "Every expert gate is forced to %d: this is for timing, results are wrong.", forced_gate
    )


class StrategyExperts:
    """``RankExperts`` of one rank by the strategies above.

    Args:
        config: the layer's shape.
        placement: this rank's experts.
        linears: their weights, see ``expert_weights.py``.
        ep_config: how to run; equal on every rank.

    Raises:
        ValueError: config, placement and weights do not fit each other.
    """

    def __init__(
        self,
        config: MoEConfig,
        placement: LocalExperts,
        linears: ExpertLinears,
        ep_config: EPConfig,
    ) -> None:
        if placement.num_experts != config.num_experts:
            raise ValueError(
                f"The placement is of {placement.num_experts} experts, but the config has "
                f"{config.num_experts}."
            )
        max_rows = rows_at_once(config.moe_intermediate_size)
        self.shard = ExpertShard(placement, linears, config.swiglu_limit, max_rows)
        self.ep_config = ep_config
        self.hidden_dtype = linears.hidden_dtype
        self.activation = self.shard.activation
        if ep_config.forced_gate is not None:
            _warn_of_forced_gate(ep_config.forced_gate)

    def compute(self, tokens: RoutedTokens) -> ExpertOutput:
        num_rows, top_k = tokens.topk_ids.shape
        name = choose_strategy(self.ep_config, num_rows, top_k, self.shard.num_experts)
        return run_experts(name, tokens, self.shard, self.ep_config)

    def compute_all(self, tokens: RoutedTokens) -> ExpertOutput:
        return run_experts("dense", tokens, self.shard, self.ep_config)


def strategy_layer(
    config: MoEConfig,
    placement: LocalExperts,
    linears: ExpertLinears,
    collectives: Collectives,
    ep_config: EPConfig | None = None,
    boundary: Boundary = no_split,
) -> EPLayer:
    """The layer over ``StrategyExperts``; arguments and errors are those of the two classes."""
    ep_config = ep_config or EPConfig()
    experts = StrategyExperts(config, placement, linears, ep_config)
    return EPLayer(config, experts, collectives, ep_config, boundary)
