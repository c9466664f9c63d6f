"""What the layer asks of one rank's experts, however they are computed."""

from typing import Protocol

import torch

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens


class RankExperts(Protocol):
    """The routed experts of one rank.

    Two kinds exist: ``StrategyExperts`` computes expert by expert (``ragged`` with shapes that
    depend on data, the others with static ones), ``DeviceExperts`` hands all rows to a device
    kernel, with static shapes.

    Attributes:
        hidden_dtype: dtype that hidden_states must have.
        activation: format that rows are cast to before the first product, so that the gather may
            send them in it; None: no cast.
    """

    hidden_dtype: torch.dtype
    activation: QuantFormat | None

    def compute(self, tokens: RoutedTokens) -> ExpertOutput:
        """Weighted sum over this rank's experts of all gathered rows; it may overflow."""
        ...

    def compute_all(self, tokens: RoutedTokens) -> ExpertOutput:
        """The same in a way that cannot overflow: asked for after ``compute`` did."""
        ...
