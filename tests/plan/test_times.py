"""One model of time for all strategies: what a plan prints and where it says one overtakes."""

from dataclasses import replace

import pytest

from vllm_moe_ep.plan.costs import Spread
from vllm_moe_ep.plan.model import ModelShape
from vllm_moe_ep.plan.platforms import PLATFORMS
from vllm_moe_ep.plan.times import MOST_ROWS, break_evens, experts_seconds

TRN2 = PLATFORMS["trn2"]
EP64 = Spread(64)
V3 = ModelShape(
    num_layers=58,
    num_experts=256,
    top_k=8,
    hidden_size=7168,
    moe_intermediate_size=2048,
    shared_width=2048,
    expert_format="fp8",
    shared_format="fp8",
)
FLASH = replace(V3, num_layers=43, top_k=6, hidden_size=4096, expert_format="fp4")
BF16 = replace(V3, expert_format="bf16", shared_format="bf16")


@pytest.mark.parametrize("model", [V3, FLASH, BF16], ids=lambda model: str(model.expert_format))
def test_as_many_rows_take_about_as_long_in_either_kernel(model: ModelShape) -> None:
    """At 16 rows a grouped table holds every row: it saves nothing, and costs a little more."""
    dense, grouped = (
        experts_seconds(model, EP64, 16, strategy, TRN2) for strategy in ("dense", "grouped")
    )
    assert dense <= grouped <= 1.1 * dense


@pytest.mark.parametrize("model", [V3, FLASH, BF16], ids=lambda model: str(model.expert_format))
def test_break_evens_agree_with_the_times(model: ModelShape) -> None:
    found = break_evens(model, EP64, TRN2)

    def seconds(num_rows: int, strategy: str) -> float:
        return experts_seconds(model, EP64, num_rows, strategy, TRN2)

    gated = found.gated_until
    assert 0 < gated < MOST_ROWS
    assert all(seconds(n, "gated") <= 0.9 * seconds(n, "dense") for n in range(1, gated + 1))
    assert seconds(gated + 1, "gated") > 0.9 * seconds(gated + 1, "dense")
    first = found.grouped_from
    assert first is not None
    later = range(first, MOST_ROWS + 1)
    assert all(seconds(n, "grouped") < seconds(n, "dense") for n in later)
    assert seconds(first - 1, "grouped") >= seconds(first - 1, "dense")


def test_more_rows_than_a_call_takes_make_more_calls() -> None:
    one, two = (experts_seconds(V3, EP64, rows, "dense", TRN2) for rows in (128, 256))
    assert two == pytest.approx(2 * one)


def test_grouping_never_pays_where_every_row_meets_a_quarter_of_the_experts() -> None:
    model = replace(BF16, num_experts=4, top_k=1)
    assert break_evens(model, Spread(1), TRN2).grouped_from is None


def test_a_format_without_kernels_is_bound_by_bytes_or_products() -> None:
    per_expert = 3 * 7168 * 2048
    assert experts_seconds(BF16, EP64, 1, "dense", TRN2) == pytest.approx(
        4 * 2 * per_expert / TRN2.bytes_per_s
    )
    assert experts_seconds(BF16, EP64, 1000, "dense", TRN2) == pytest.approx(
        4 * 2 * per_expert * 1000 / TRN2.flops
    )
