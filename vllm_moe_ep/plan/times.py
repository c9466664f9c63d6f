"""Least time of a layer's experts: one model for all strategies, so that they can be compared.

Where the platform has kernels for the experts' format, their counts give the time, and a step with
more rows than a call takes makes several calls. Elsewhere it is the longer of reading the weights
and multiplying.
"""

from dataclasses import dataclass
from functools import cache

from vllm_moe_ep.plan import costs
from vllm_moe_ep.plan.costs import Spread
from vllm_moe_ep.plan.kernels import kernel_costs
from vllm_moe_ep.plan.model import ModelShape
from vllm_moe_ep.plan.platforms import Platform
from vllm_moe_ep_kernels.nki.experts import MAX_ROWS

MOST_ROWS = 4096
"""Up to which sizes are compared."""
_LEAST_SAVED = 0.1
"""Below this share of the time a gate is not worth its place in the graph."""


@dataclass(frozen=True, slots=True)
class BreakEvens:
    """Between strategies, by time.

    Attributes:
        gated_until: most rows up to which gates save a tenth of the dense experts' time at every
            size; 0: not even for one row.
        grouped_from: fewest rows from which grouped experts are faster than dense ones at every
            size up to MOST_ROWS; None: not even there.
    """

    gated_until: int
    grouped_from: int | None


@cache
def experts_seconds(
    model: ModelShape, spread: Spread, num_rows: int, strategy: str, platform: Platform
) -> float:
    """Of one layer on the rank that holds most experts, ``num_rows`` over all token ranks."""
    rows = costs.computed_rows(model, num_rows, strategy)
    if not _has_kernels(model, spread, platform):
        return costs.roofline_seconds(model, spread, num_rows, strategy, platform)
    full_calls, rest = divmod(rows, MAX_ROWS)
    sizes = [MAX_ROWS] * full_calls + ([rest] if rest else [])
    return sum(_call_seconds(model, spread, size, strategy) for size in sizes)


@cache
def _has_kernels(model: ModelShape, spread: Spread, platform: Platform) -> bool:
    found = kernel_costs(model, spread, 1) if platform.has_nki_kernels else []
    return bool(found) and found[0].refusal is None


@cache
def _call_seconds(model: ModelShape, spread: Spread, num_rows: int, strategy: str) -> float:
    cost = kernel_costs(model, spread, num_rows, has_own_rows=strategy == "grouped")[0]
    return cost.critical(costs.computed_experts(model, spread, num_rows, strategy))[1] / 1e6


def break_evens(model: ModelShape, spread: Spread, platform: Platform) -> BreakEvens:
    """Searched size by size: the times rise in steps, with the calls and the grouped tables."""
    gated_until, grouped_from = 0, 1
    for num_rows in range(1, MOST_ROWS + 1):
        dense, gated, grouped = (
            experts_seconds(model, spread, num_rows, strategy, platform)
            for strategy in ("dense", "gated", "grouped")
        )
        if gated_until == num_rows - 1 and gated <= (1 - _LEAST_SAVED) * dense:
            gated_until = num_rows
        if grouped >= dense:
            grouped_from = num_rows + 1
    return BreakEvens(gated_until, grouped_from if grouped_from <= MOST_ROWS else None)
