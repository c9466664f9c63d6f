"""One rank's experts, as every strategy sees them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_weights import (
    ActivatingExperts,
    CastingExperts,
    ExpertLinears,
    FusedExperts,
)
from vllm_moe_ep.layers.row_parts import FEWEST_ROWS
from vllm_moe_ep.placement import NO_EXPERT, LocalExperts
from vllm_moe_ep.quant.cast import quantise_dequantise
from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.stages import RoutedTokens
from vllm_moe_ep_kernels.host.swiglu import swiglu

# Equal to no normalised id: those are -1 or a global id.
_UNUSED_SLOT = -2


@dataclass(frozen=True, slots=True)
class SlotRouting:
    """Which rows one expert serves.

    Attributes:
        routed: bool [rows].
        row_weight: fp32 [rows], the row's weights for this expert added up; 0 where not routed.
    """

    routed: Tensor
    row_weight: Tensor


class ExpertShard:
    """Placement, weights and activation of this rank's experts.

    Args:
        placement: this rank's view of the placement.
        linears: the weights; they may hold more slots than the placement has local experts.
            Such trailing slots are never read by a result.
        swiglu_limit: clamp of the activation, or None.
        max_rows: rows that an expert computes at once outside of a graph, see ``row_parts``.

    Attributes:
        fused: the weights again, where they compute whole experts in one call.
        activation: format that rows are cast to before the first product, or None.
        slot_ids: int32 [num_slots], the global id of each slot. A tensor, so that ranks with
            different ids trace the same graph.

    Raises:
        ValueError: there are fewer slots than local experts.
    """

    def __init__(
        self,
        placement: LocalExperts,
        linears: ExpertLinears,
        swiglu_limit: float | None,
        max_rows: int = FEWEST_ROWS,
    ) -> None:
        num_unused = linears.num_slots - placement.num_local_experts
        if num_unused < 0:
            raise ValueError(
                f"The weights hold {linears.num_slots} experts, but the placement gives this rank "
                f"{placement.num_local_experts}."
            )
        self.linears = linears
        self.fused = linears if isinstance(linears, FusedExperts) else None
        # A grouped kernel takes rows as they are.
        self.activation: QuantFormat | None = None
        if isinstance(linears, CastingExperts) and self.fused is None:
            self.activation = linears.activation
        self.swiglu_limit = swiglu_limit
        self.max_rows = max_rows
        self.num_experts = placement.num_experts
        self.holds_all_experts = placement.num_local_experts == placement.num_experts
        self.slot_of = placement.local_id_of
        slot_ids = [*placement.global_ids, *[_UNUSED_SLOT] * num_unused]
        self.slot_ids = torch.tensor(slot_ids, dtype=torch.int32, device=linears.device)
        # One more entry, which index num_experts and index -1 both read: "no slot".
        slots = [*placement.expert_map(), NO_EXPERT]
        slots = [linears.num_slots if slot == NO_EXPERT else slot for slot in slots]
        self.slot_table = torch.tensor(slots, dtype=torch.int64, device=linears.device)

    def slots_by_id(self, topk_ids: Tensor) -> Tensor:
        """Slot of each id, num_slots for ids without one; int64, ids of any integer dtype."""
        return self.slot_table[topk_ids.to(torch.int64).clamp(-1, self.num_experts)]

    def routing(self, slot: int, topk_ids: Tensor, topk_weights: Tensor) -> SlotRouting:
        """Rows of one slot, from normalised ids and fp32 weights, both [rows, top_k].

        Weights are selected, never multiplied by a mask: those of padding may be NaN.
        """
        hits = topk_ids == self.slot_ids[slot]
        return SlotRouting(hits.any(dim=1), torch.where(hits, topk_weights, 0.0).sum(dim=1))

    def rows(self, tokens: RoutedTokens) -> Tensor:
        """[rows, hidden_size] in the activation dtype, cast once for all experts."""
        hidden_states = tokens.hidden_states
        if self.activation is not None and not tokens.is_cast:
            hidden_states = quantise_dequantise(hidden_states, self.activation)
        return hidden_states.to(self.linears.activation_dtype)

    def compute(
        self, slot: int, rows: Tensor, row_weight: Tensor, flag: Tensor | None = None
    ) -> Tensor:
        """One expert on all ``rows`` ([rows, hidden_size], see ``rows``), times fp32
        ``row_weight`` [rows] -> [rows, hidden_size], bf16 or fp32."""
        # Not kept in a variable: it is freed before the second product.
        activated = self.activate(self.linears.gate_up(slot, rows, flag), row_weight)
        return self.linears.down(slot, activated, flag)

    def activate(self, gate_up: Tensor, row_weight: Tensor) -> Tensor:
        if isinstance(self.linears, ActivatingExperts):
            return self.linears.swiglu(gate_up, row_weight, self.swiglu_limit)
        return swiglu(gate_up, row_weight, self.swiglu_limit, self.linears.activation_dtype)
