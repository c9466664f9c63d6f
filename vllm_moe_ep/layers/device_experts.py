"""Experts that a device kernel computes for all rows at once: static shapes, no host look."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens

DeviceKernel = Callable[[RoutedTokens], Tensor]
"""[rows] with global ids, any of which may be of no local expert, -1 included -> this rank's
weighted sum, [rows, hidden_size]; exactly 0 in a row without a local expert."""


class DeviceExperts:
    """``RankExperts`` by one kernel, whose output keeps its dtype until the step's last cast.

    Args:
        kernel: the experts.
        hidden_dtype: dtype of hidden_states.
    """

    activation: QuantFormat | None = None

    def __init__(self, kernel: DeviceKernel, hidden_dtype: torch.dtype = torch.bfloat16) -> None:
        self.kernel = kernel
        self.hidden_dtype = hidden_dtype

    def compute(self, tokens: RoutedTokens) -> ExpertOutput:
        return ExpertOutput(self.kernel(tokens))

    def compute_all(self, tokens: RoutedTokens) -> ExpertOutput:
        return self.compute(tokens)
