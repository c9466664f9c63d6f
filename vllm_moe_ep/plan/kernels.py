"""Least time of the experts on the NKI kernels, by the counts of their emulator."""

from dataclasses import dataclass

from vllm_moe_ep.plan import costs
from vllm_moe_ep.plan.costs import Spread
from vllm_moe_ep.plan.model import ModelShape
from vllm_moe_ep_kernels.nki.expert_cost import (
    ExpertShape,
    Tally,
    WeightForm,
    base_cost,
    expert_cost,
    refusal,
)
from vllm_moe_ep_kernels.nki.experts import MAX_ROWS

_FP8_BLOCKS = WeightForm(is_fp4=False, columns_per_scale=128, is_scale_per_row=False)
_FP4 = WeightForm(is_fp4=True, columns_per_scale=32, is_scale_per_row=True, scale_bytes=1)
_FP4_AS_FP8 = WeightForm(is_fp4=False, columns_per_scale=128, is_scale_per_row=True, scale_bytes=1)
# How the kernels can hold a checkpoint's experts; its own form first.
FORMS = {
    "fp8": {"fp8": _FP8_BLOCKS},
    "fp8-ue8m0": {"fp8": _FP8_BLOCKS},
    "fp4": {"FP4, unpacked on the chip": _FP4, "FP4 turned into fp8 at load": _FP4_AS_FP8},
}


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Of one call on one rank.

    Attributes:
        form: how the weights are held, for people.
        num_rows: of the call; a step with more makes several.
        base_us, each_us: bounds per engine of the call, and of each expert that it visits.
        refusal: why there is no kernel; then the bounds are empty.
    """

    form: str
    num_rows: int
    base_us: dict[str, float]
    each_us: dict[str, float]
    refusal: str | None = None

    def bounds_us(self, num_experts: float) -> dict[str, float]:
        """Least time of each resource for a call that visits so many experts."""
        return {
            name: self.base_us[name] + num_experts * self.each_us[name] for name in self.each_us
        }

    def critical(self, num_experts: float) -> tuple[str, float]:
        """The resource with the largest bound, and that bound in microseconds."""
        bounds = self.bounds_us(num_experts)
        name = max(bounds, key=lambda resource: bounds[resource])
        return name, bounds[name]


def kernel_costs(
    model: ModelShape, spread: Spread, num_rows: int, has_own_rows: bool = False
) -> list[KernelCost]:
    """One call for each form that the experts can have; empty where no kernel reads their format.

    Args:
        num_rows: of the step; a call takes at most MAX_ROWS of them.
        has_own_rows: whether each expert has such a number of rows of its own (grouped experts).
    """
    rows = min(num_rows, MAX_ROWS)
    shape = ExpertShape(
        rows, model.hidden_size, model.moe_intermediate_size, has_own_rows=has_own_rows
    )
    found = []
    for name, form in FORMS.get(model.expert_format, {}).items():
        reason = refusal(shape, form)
        if reason is not None:
            found.append(KernelCost(name, rows, {}, {}, reason))
            continue
        base: Tally = base_cost(shape, costs.local_experts(model, spread))
        each = expert_cost(shape, form)
        found.append(KernelCost(name, rows, base.bounds_us(), each.bounds_us()))
    return found
