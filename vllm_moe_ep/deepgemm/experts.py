"""The routed experts of one rank on DeepGEMM: lay out, multiply, activate, multiply, combine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.deepgemm.contiguous_layout import ContiguousLayout, plan_contiguous
from vllm_moe_ep.deepgemm.expert_gemms import ExpertGemms
from vllm_moe_ep.stages import ExpertOutput, RoutedTokens
from vllm_moe_ep_kernels.reference.combine_pairs import combine_pairs
from vllm_moe_ep_kernels.reference.swiglu import swiglu

Activation = Callable[[Tensor], Tensor]


def gated_silu(swiglu_limit: float | None = None) -> Activation:
    """bf16 [rows, 2 * width], gate columns first -> [rows, width]: SwiGLU with a clamp or none."""

    def activate(rows: Tensor) -> Tensor:
        ones = torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
        return swiglu(rows, ones, swiglu_limit, rows.dtype)

    return activate


def plain_silu(rows: Tensor) -> Tensor:
    """bf16 [rows, width] -> the same shape, for experts without a gate."""
    return torch.nn.functional.silu(rows.to(torch.float32)).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class DeepGemmExperts:
    """This rank's experts.

    Attributes:
        gemms: the weights and their products.
        activation: between the two projections.
        w13_bias: [num_local_experts, rows of the first projection], or None.
        w2_bias: [num_local_experts, hidden_size], or None.
    """

    gemms: ExpertGemms
    activation: Activation
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None

    def __call__(self, tokens: RoutedTokens) -> ExpertOutput:
        """Weighted sum of the local experts; no count travels to the host.

        Args:
            tokens: bf16 rows with local ids; an id outside [0, num_local_experts) selects none.

        Raises:
            UnsupportedError: the rows are not bf16.
            ValueError: the rows are on another device than the weights.
        """
        hidden_states = tokens.hidden_states
        if hidden_states.device != self.gemms.device:
            raise ValueError(
                f"hidden_states are on {hidden_states.device}, the experts on "
                f"{self.gemms.device}: DeepGEMM's experts need one device per process."
            )
        if hidden_states.shape[0] == 0:
            return ExpertOutput(hidden_states.to(torch.float32))
        bundle = self.gemms.bundle
        layout = plan_contiguous(
            tokens.topk_ids,
            self.gemms.num_local_experts,
            bundle.alignment,
            bundle.capability[0],
        )
        rows = _with_bias(self.gemms.up(hidden_states, layout), self.w13_bias, layout)
        rows = self.gemms.down(self.activation(rows), layout)
        values = _with_bias(rows, self.w2_bias, layout)
        return ExpertOutput(
            combine_pairs(values, layout.row_of_pair, layout.is_routed, tokens.topk_weights)
        )


def _with_bias(rows: Tensor, bias: Tensor | None, layout: ContiguousLayout) -> Tensor:
    """Each row plus its expert's bias, rounded once; rows without an expert get any."""
    if bias is None:
        return rows
    per_row = bias[layout.expert_of_row.clamp(min=0)]
    return (rows.to(torch.float32) + per_row.to(torch.float32)).to(rows.dtype)
