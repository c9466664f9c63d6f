"""The expert-parallel MoE layer: one step, around whatever computes a rank's experts.

Gather the rows of all token ranks in one collective, run this rank's experts on them,
reduce-scatter the sums, add the shared expert, all-reduce over the replica group. Every rank
enters the same collectives, with sizes that follow from ``capacity``, whether it has tokens or
not.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.checks import check_step
from vllm_moe_ep.layers.combine import reduce_with_flag
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.layers.rank_experts import RankExperts
from vllm_moe_ep.layers.regions import (
    AFTER_COMBINE,
    BEFORE_COMBINE,
    BEFORE_EXPERTS,
    Boundary,
    no_split,
)
from vllm_moe_ep.layers.routing import mask_padding
from vllm_moe_ep.layers.row_parts import row_parts
from vllm_moe_ep.stages import LocalRouting, RoutedTokens, StepResult

_ADDED_ROWS = 256

SharedExperts = Tensor | Callable[[Tensor], Tensor]


class EPLayer:
    """One MoE layer on one rank.

    Not an ``nn.Module``: it owns no parameter and adds nothing to a state dict.

    Args:
        config: the layer's shape.
        experts: this rank's experts.
        collectives: the groups of ranks; every rank builds its layers in the same order.
        ep_config: how to run; equal on every rank.
        boundary: called between the regions of a step, see ``regions.py``.
    """

    def __init__(
        self,
        config: MoEConfig,
        experts: RankExperts,
        collectives: Collectives,
        ep_config: EPConfig | None = None,
        boundary: Boundary = no_split,
    ) -> None:
        self.config = config
        self.experts = experts
        self.collectives = collectives
        self.ep_config = ep_config or EPConfig()
        self.boundary = boundary

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
        local: LocalRouting | None = None,
    ) -> Tensor:
        """The whole step, done again completely where the experts overflowed; see ``step``.

        Returns:
            [num_tokens, hidden_size] in the dtype of hidden_states, complete on every rank.
        """
        tokens = self._tokens(hidden_states, topk_ids, topk_weights, capacity, valid, local)
        result = self._step(tokens, capacity, shared, shared_is_partial)
        if result.overflow is None or not result.overflow.item():
            return result.hidden_states
        # Its memory is needed for doing the step again.
        del result
        return self._step(tokens, capacity, shared, shared_is_partial, is_rerun=True).hidden_states

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
        """The whole step as one graph without a branch on data (with any experts but ragged).

        Args:
            hidden_states: [num_tokens, hidden_size] in the experts' ``hidden_dtype``.
            topk_ids: [num_tokens, top_k] global ids, any integer dtype and stride. An id outside
                [0, num_experts) selects no expert; an id that repeats in a row adds up.
            topk_weights: [num_tokens, top_k], any float dtype.
            capacity: rows per rank of this step, num_tokens or more, equal on every token rank.
            valid: bool [num_tokens]; rows with False select no expert.
            shared: output of the shared experts on hidden_states, [num_tokens, hidden_size], or a
                function that computes it from them; any float dtype, added before the last cast.
            shared_is_partial: True where each replica rank holds a slice of the shared experts,
                so that their outputs must be summed; False where each computes them whole.

        Raises:
            ValueError: a shape or dtype does not fit, or num_tokens exceeds capacity.
        """
        tokens = self._tokens(hidden_states, topk_ids, topk_weights, capacity, valid)
        return self._step(tokens, capacity, shared, shared_is_partial)

    def _step(
        self,
        tokens: RoutedTokens,
        capacity: int,
        shared: SharedExperts | None,
        shared_is_partial: bool,
        is_rerun: bool = False,
    ) -> StepResult:
        hidden_states = tokens.hidden_states
        gathered = self._gather(tokens, capacity)
        self.boundary(BEFORE_EXPERTS)
        compute = self.experts.compute_all if is_rerun else self.experts.compute
        output = compute(gathered)
        shared_values = shared(hidden_states) if callable(shared) else shared
        self.boundary(BEFORE_COMBINE)
        values = self.collectives.reduce_scatter(output.values)[: hidden_states.shape[0]]
        if shared_is_partial:
            values, shared_values = _added(values, shared_values), None
        reduced = reduce_with_flag(replace(output, values=values), self.collectives)
        self.boundary(AFTER_COMBINE)
        values, shared_values = _added(reduced.values, shared_values), None
        return StepResult(values.to(hidden_states.dtype), reduced.overflow)

    def _tokens(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        capacity: int,
        valid: Tensor | None,
        local: LocalRouting | None = None,
    ) -> RoutedTokens:
        tokens = RoutedTokens(hidden_states, topk_ids, topk_weights, local=local)
        check_step(tokens, capacity, self.config, self.experts.hidden_dtype)
        return tokens if valid is None else mask_padding(tokens, valid)

    def _gather(self, tokens: RoutedTokens, capacity: int) -> RoutedTokens:
        return gather_tokens(
            tokens,
            capacity,
            self.config,
            self.ep_config,
            self.collectives,
            self.experts.activation,
        )


def _added(values: Tensor, shared_values: Tensor | None) -> Tensor:
    """Their sum, in the place of fp32 values: a large step has no room for a third tensor."""
    if shared_values is None:
        return values
    if values.dtype is not torch.float32:
        return values + shared_values
    # torch makes an fp32 copy of what it adds.
    for part in row_parts(len(values), _ADDED_ROWS):
        values[part].add_(shared_values[part])
    return values
