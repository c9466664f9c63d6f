"""The routed experts of one rank where each has few rows, on our own kernels (SM90).

The weights of each expert that is hit are read once. A step is two launches for one token, three
while programs can look up their pairs, and four with the pairs sorted before. Every shape follows
from the number of tokens and no value travels to the host. The same input gives the same bits,
wherever in the batch a row lies; another number of tokens may be cut in another way.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_moe_ep.deepgemm.few_row_kernels import FewRowKernels
from vllm_moe_ep.deepgemm.few_row_table import FewRowStep, few_row_step
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights, check_weights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.stages import RoutedTokens
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting

_GROUP = 128
Scaled = tuple[Tensor, Tensor | None]
"""Numbers and, for fp8, their scales."""


class FewRowExperts:
    """This rank's experts by the few-row kernels.

    Args:
        weights: held by reference; fp8 ones with fp32 scales per 128x128 block.
        kernels: one implementation.
        num_experts: over all ranks.
        expert_map: int32 [num_experts], local id or -1; None where every expert is local.
        swiglu_limit: clamp of the activation, or None.
        step_of: number of tokens and top_k -> how to compute them; the table's way if None.

    Raises:
        UnsupportedError: the weights' format is another one.
        ValueError: the two weights do not fit each other.
    """

    def __init__(
        self,
        weights: HopperWeights,
        kernels: FewRowKernels,
        num_experts: int,
        expert_map: Tensor | None = None,
        swiglu_limit: float | None = None,
        step_of: Callable[[int, int], FewRowStep] | None = None,
    ) -> None:
        check_weights(weights)
        self.weights = weights
        self.kernels = kernels
        self.num_experts = num_experts
        self.expert_map = expert_map
        self.swiglu_limit = swiglu_limit
        self._step_of = self._table_step if step_of is None else step_of
        self._w13 = _scaled(weights.w13)
        self._w2 = _scaled(weights.w2)

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        """Weighted sum of the local experts.

        Args:
            tokens: bf16 [num_tokens, hidden_size] with global ids.

        Returns:
            bf16 [num_tokens, hidden_size]; rows without a local expert are exactly 0.

        Raises:
            UnsupportedError: the rows are not bf16.
        """
        rows = tokens.hidden_states
        if rows.dtype != torch.bfloat16:
            raise UnsupportedError(
                f"The few-row experts take bfloat16 activations, found {rows.dtype}: serve with "
                "--dtype bfloat16."
            )
        out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        if out.shape[0] == 0:
            return out
        step = self._step_of(*tokens.topk_ids.shape)
        routing = PairRouting(tokens.topk_ids, self.expert_map, self._w13[0].shape[0])
        scaled: Scaled = (rows if rows.stride(1) == 1 else rows.contiguous(), None)
        if step.is_planned:
            routing, scaled = self._plan(routing, scaled[0], step)
        inner = self._gate_up(scaled, routing, step)
        self._down(inner, routing, step, tokens.topk_weights, out)
        return out

    def _table_step(self, num_tokens: int, top_k: int) -> FewRowStep:
        return few_row_step(num_tokens, top_k, self.num_experts, self.weights.is_fp8)

    def _plan(
        self, routing: PairRouting, rows: Tensor, step: FewRowStep
    ) -> tuple[PairRouting, Scaled]:
        tiles, cast = self.kernels.plan(
            routing,
            step.gate_up.block_rows,
            rows if self.weights.is_fp8 else None,
            is_overlapped=step.gate_up.is_overlapped,
        )
        planned = PairRouting(
            routing.topk_ids, routing.expert_map, routing.num_local_experts, tiles
        )
        return planned, (rows, None) if cast is None else cast

    def _gate_up(self, rows: Scaled, routing: PairRouting, step: FewRowStep) -> Scaled:
        width = self._w2[0].shape[2]
        inner: Scaled = (rows[0].new_empty((routing.num_pairs, width), dtype=torch.bfloat16), None)
        if step.is_inner_fp8 and self.weights.is_fp8:
            values = rows[0].new_empty((routing.num_pairs, width), dtype=torch.float8_e4m3fn)
            scale_size = (routing.num_pairs, width // _GROUP)
            inner = (values, rows[0].new_empty(scale_size, dtype=torch.float32))
        self.kernels.gate_up(
            *rows, *self._w13, routing, self.swiglu_limit, *inner, tiles=step.gate_up
        )
        return inner

    def _down(
        self,
        inner: Scaled,
        routing: PairRouting,
        step: FewRowStep,
        topk_weights: Tensor,
        out: Tensor,
    ) -> None:
        if step.is_combined:
            self.kernels.down_combined(
                *inner, *self._w2, routing, topk_weights, out, tiles=step.down
            )
            return
        # Parts of a sum are not rounded before they are added.
        dtype = torch.bfloat16 if step.num_parts == 1 else torch.float32
        size = (step.num_parts, routing.num_pairs, out.shape[1])
        parts = torch.empty(size, dtype=dtype, device=out.device)
        self.kernels.down(*inner, *self._w2, routing, parts, tiles=step.down)
        self.kernels.combine(
            parts, routing, topk_weights, out, is_overlapped=step.down.is_overlapped
        )


def _scaled(weight: Tensor | ScaledWeight) -> Scaled:
    return (weight.values, weight.scale) if isinstance(weight, ScaledWeight) else (weight, None)
