"""What one stage of a step hands to the next."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LocalRouting:
    """Routing that names no expert but this rank's, for `FusedExperts.fused`.

    Attributes:
        slots: int32 [rows, top_k].
        weights: fp32 [rows, top_k], 0 where the id was not of this rank.
        has_local: bool [rows, 1], False for rows without any expert here: drop what they get.
    """

    slots: Tensor
    weights: Tensor
    has_local: Tensor


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Rows with their routing: a rank's own before the gather, all token ranks' after it.

    Attributes:
        hidden_states: [rows, hidden_size] in the activation dtype; may be strided.
        topk_ids: [rows, top_k] global expert ids, any integer dtype; an id outside
            [0, num_experts) selects no expert.
        topk_weights: [rows, top_k], any float dtype; unspecified (NaN included) at ids that
            select no expert.
        is_cast: whether hidden_states hold, in fp32, what is left of them after the cast that
            the expert weights ask for.
        local: the same routing in terms of this rank's experts, where a graph around the layer
            has worked it out; None: not yet.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    is_cast: bool = False
    local: LocalRouting | None = None

    def rows(self, part: slice) -> "RoutedTokens":
        """Some of the rows, as views."""
        parts = self.hidden_states[part], self.topk_ids[part], self.topk_weights[part]
        return RoutedTokens(*parts, is_cast=self.is_cast)


@dataclass(frozen=True, slots=True)
class ExpertOutput:
    """Weighted sum of this rank's experts.

    Attributes:
        values: [rows, hidden_size], fp32 (or the dtype of a device kernel's output); exactly 0 in
            a row that selects none of them.
        overflow: int32 [1], 1 where a capacity was exceeded and ``values`` is incomplete;
            None from strategies that cannot overflow.
        with_spare_row: ``values``, not a copy of them, and one more row that may be overwritten:
            room for the flag; None where there is none.
    """

    values: Tensor
    overflow: Tensor | None = None
    with_spare_row: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Output of a whole traced step.

    Attributes:
        hidden_states: [num_tokens, hidden_size] in the activation dtype.
        overflow: int32 [1], equal on every rank, or None; 1: rerun the step dense.
    """

    hidden_states: Tensor
    overflow: Tensor | None
