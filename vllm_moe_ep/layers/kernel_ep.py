"""The expert-parallel layer around one rank's grouped kernels.

As the static-shape layer, it gathers the rows of all token ranks in one collective, computes this
rank's experts on them, and reduce-scatters the sums. Shapes follow from ``capacity``; no value
travels to the host. With one token rank it is the experts alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.checks import check_step
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.layers.routing import mask_padding
from vllm_moe_ep.stages import RoutedTokens

LocalExpertsKernel = Callable[[RoutedTokens], Tensor]
"""[rows] with global ids, any of which may be of no local expert, -1 included -> this rank's
weighted sum, [rows, hidden_size]; exactly 0 in a row without a local expert."""


class KernelEPLayer:
    """Routed experts of one MoE layer on one rank.

    Args:
        config: the layer's shape.
        experts: this rank's experts.
        collectives: the groups of ranks; every rank builds its layers in the same order.
        ep_config: how tokens are packed; equal on every rank.
        hidden_dtype: dtype of hidden_states.
    """

    def __init__(
        self,
        config: MoEConfig,
        experts: LocalExpertsKernel,
        collectives: Collectives,
        ep_config: EPConfig,
        hidden_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = config
        self.experts = experts
        self.collectives = collectives
        self.ep_config = ep_config
        self.hidden_dtype = hidden_dtype

    def routed_partial(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        capacity: int,
        valid: Tensor | None = None,
    ) -> Tensor:
        """Routed sum of this rank's tokens, still to be added up over the replica group.

        Arguments and errors are those of ``StaticEPLayer.routed_partial``.

        Returns:
            [num_tokens, hidden_size] in the dtype of hidden_states.
        """
        tokens = RoutedTokens(hidden_states, topk_ids, topk_weights)
        check_step(tokens, capacity, self.config, self.hidden_dtype)
        if valid is not None:
            tokens = mask_padding(tokens, valid)
        gathered = gather_tokens(tokens, capacity, self.config, self.ep_config, self.collectives)
        values = self.collectives.reduce_scatter(self.experts(gathered))
        return values[: hidden_states.shape[0]]
