"""The static-shape expert-parallel MoE layer.

One step: gather the rows of all token ranks in one collective, run this rank's experts on them,
reduce-scatter the fp32 sums, add the shared expert, all-reduce over the replica group. Every
shape follows from ``capacity``, never from how many tokens a rank or an expert received, and
every rank enters the same collectives, whether it has tokens or not.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.checks import check_step
from vllm_moe_ep.layers.combine import combine_overflow, reduce_with_flag
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import ExpertLinears
from vllm_moe_ep.layers.experts import choose_strategy, run_experts
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.layers.regions import (
    AFTER_COMBINE,
    BEFORE_COMBINE,
    BEFORE_EXPERTS,
    Boundary,
    no_split,
)
from vllm_moe_ep.layers.routing import mask_padding
from vllm_moe_ep.layers.row_parts import rows_at_once
from vllm_moe_ep.layers.shared_expert import (
    SharedExpert,
    slice_shared_expert,
    why_not_sliced,
)
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens, StepResult

logger = logging.getLogger(__name__)

SharedExperts = Tensor | Callable[[Tensor], Tensor]


@cache
def _warn_of_forced_gate(forced_gate: int) -> None:
    """Once per process, not once per layer."""
    logger.warning(
        "Every expert gate is forced to %d: this is for timing, results are wrong.", forced_gate
    )


@cache
def _log_whole_shared_expert(reason: str) -> None:
    logger.info("Each rank computes the whole shared expert: %s.", reason)


class StaticEPLayer:
    """Routed experts of one MoE layer on one rank.

    Not an ``nn.Module``: it owns no parameter and adds nothing to a state dict.

    Args:
        config: the layer's shape.
        placement: this rank's experts.
        linears: their weights, see ``expert_weights.py``.
        collectives: the groups of ranks; every rank builds its layers in the same order.
        ep_config: how to run; equal on every rank.
        boundary: called between the regions of a step, see ``regions.py``.

    Raises:
        ValueError: config, placement and weights do not fit each other.
    """

    def __init__(
        self,
        config: MoEConfig,
        placement: LocalExperts,
        linears: ExpertLinears,
        collectives: Collectives,
        ep_config: EPConfig | None = None,
        boundary: Boundary = no_split,
    ) -> None:
        if placement.num_experts != config.num_experts:
            raise ValueError(
                f"The placement is of {placement.num_experts} experts, but the config has "
                f"{config.num_experts}."
            )
        self.config = config
        self.ep_config = ep_config or EPConfig()
        self.collectives = collectives
        self.boundary = boundary
        max_rows = rows_at_once(config.moe_intermediate_size)
        self.shard = ExpertShard(placement, linears, config.swiglu_limit, max_rows)
        if self.ep_config.forced_gate is not None:
            _warn_of_forced_gate(self.ep_config.forced_gate)

    def prepare_shared(self, whole: SharedExpert) -> SharedExpert:
        """This rank's part of the layer's shared experts, to be made once when weights are loaded.

        A slice where ``why_not_sliced`` has no objection, and else ``whole``: the log says why.
        ``refresh_slice`` brings later weights into it.
        """
        ours = self.collectives
        reason = why_not_sliced(whole.width, ours.replica_size, self.ep_config.shared_slices)
        if reason is not None:
            _log_whole_shared_expert(reason)
            return whole
        return slice_shared_expert(whole, ours.replica_size, ours.replica_rank)

    def routed_partial(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        capacity: int,
        valid: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Routed sum of this rank's tokens, still to be added up over the replica group.

        Args:
            hidden_states: [num_tokens, hidden_size] in the weights' activation dtype.
            topk_ids: [num_tokens, top_k] global ids, any integer dtype and stride. An id outside
                [0, num_experts) selects no expert; an id that repeats in a row adds up.
            topk_weights: [num_tokens, top_k], any float dtype.
            capacity: rows per rank of this step, num_tokens or more, equal on every token rank.
            valid: bool [num_tokens]; rows with False select no expert.
            out_dtype: dtype of the result; None: that of hidden_states.

        Returns:
            [num_tokens, hidden_size]; rows without any expert are exactly 0.

        Raises:
            ValueError: a shape or dtype does not fit, or num_tokens exceeds capacity.
        """
        tokens = self._tokens(hidden_states, topk_ids, topk_weights, capacity, valid)
        gathered = self._gather(tokens, capacity)
        self.boundary(BEFORE_EXPERTS)
        output = self._run_experts(gathered)
        self.boundary(BEFORE_COMBINE)
        if output.overflow is not None:
            # All ranks decide alike, although the rerun holds no collective: ranks then also
            # agree on how long the step takes.
            if combine_overflow(output.overflow, self.collectives).item():
                output = self._run_experts(gathered, "dense")
        values = self.collectives.reduce_scatter(output.values)[: hidden_states.shape[0]]
        self.boundary(AFTER_COMBINE)
        return values.to(out_dtype or hidden_states.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        capacity: int,
        valid: Tensor | None = None,
        shared: SharedExperts | None = None,
        shared_is_partial: bool = False,
    ) -> Tensor:
        """The whole step, rerun dense when the grouped strategy overflowed; see ``step``.

        Returns:
            [num_tokens, hidden_size] in the dtype of hidden_states, complete on every rank.
        """
        tokens = self._tokens(hidden_states, topk_ids, topk_weights, capacity, valid)
        result = self._step(tokens, capacity, shared, shared_is_partial)
        if result.overflow is not None and result.overflow.item():
            result = self._step(tokens, capacity, shared, shared_is_partial, "dense")
        return result.hidden_states

    __call__ = forward

    def step(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        capacity: int,
        valid: Tensor | None = None,
        shared: SharedExperts | None = None,
        shared_is_partial: bool = False,
    ) -> StepResult:
        """The whole step as one graph without a branch on data (unless host_mode chooses so).

        Args:
            shared: output of the shared experts on hidden_states, [num_tokens, hidden_size], or a
                function that computes it from them; any float dtype, added in fp32.
            shared_is_partial: True where each replica rank holds a slice of the shared experts,
                so that their outputs must be summed; False where each computes them whole.

        The other arguments and the errors are those of ``routed_partial``.
        """
        tokens = self._tokens(hidden_states, topk_ids, topk_weights, capacity, valid)
        return self._step(tokens, capacity, shared, shared_is_partial)

    def _step(
        self,
        tokens: RoutedTokens,
        capacity: int,
        shared: SharedExperts | None,
        shared_is_partial: bool,
        strategy: str | None = None,
    ) -> StepResult:
        hidden_states = tokens.hidden_states
        gathered = self._gather(tokens, capacity)
        self.boundary(BEFORE_EXPERTS)
        output = self._run_experts(gathered, strategy)
        shared_values = shared(hidden_states) if callable(shared) else shared
        self.boundary(BEFORE_COMBINE)
        values = self.collectives.reduce_scatter(output.values)[: hidden_states.shape[0]]
        if shared_values is not None and shared_is_partial:
            values = values + shared_values
        reduced = reduce_with_flag(ExpertOutput(values, output.overflow), self.collectives)
        self.boundary(AFTER_COMBINE)
        values = reduced.values
        if shared_values is not None and not shared_is_partial:
            values = values + shared_values
        return StepResult(values.to(hidden_states.dtype), reduced.overflow)

    def _tokens(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        capacity: int,
        valid: Tensor | None,
    ) -> RoutedTokens:
        tokens = RoutedTokens(hidden_states, topk_ids, topk_weights)
        check_step(tokens, capacity, self.config, self.shard.linears.hidden_dtype)
        return tokens if valid is None else mask_padding(tokens, valid)

    def _gather(self, tokens: RoutedTokens, capacity: int) -> RoutedTokens:
        return gather_tokens(
            tokens,
            capacity,
            self.config,
            self.ep_config,
            self.collectives,
            self.shard.activation,
        )

    def _run_experts(self, tokens: RoutedTokens, strategy: str | None = None) -> ExpertOutput:
        num_rows, num_experts = tokens.hidden_states.shape[0], self.config.num_experts
        name = strategy or choose_strategy(self.ep_config, num_rows, self.config.top_k, num_experts)
        return run_experts(name, tokens, self.shard, self.ep_config)
