"""The formulas of a call's cost give what the emulator counts, engine by engine."""

import math

import ml_dtypes
import numpy as np
import pytest

from vllm_moe_ep_kernels.nki.expert_cost import (
    ExpertShape,
    Tally,
    WeightForm,
    base_cost,
    expert_cost,
    refusal,
)
from vllm_moe_ep_kernels.nki.experts import gated_experts, grouped_experts
from vllm_moe_ep_kernels.nki.launch import has_simulator
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.simulate import simulate

pytestmark = pytest.mark.skipif(has_simulator(), reason="counts are the emulator's")

HIDDEN, WIDTH, NUM_EXPERTS = 1024, 512, 2
FORMS = {
    "fp8 128x128": WeightForm(False, 128, False),
    "fp8 1x128": WeightForm(False, 128, True, 1),
    "fp8 1x32 fp32": WeightForm(False, 32, True, 4),
    "FP4 1x32": WeightForm(True, 32, True, 1),
    "fp8 per channel": WeightForm(False, 0, True, 4),
}


def make_weight(form: WeightForm, n: int, k: int, k_parts: int) -> PreparedWeight:
    rng = np.random.default_rng()
    values = rng.integers(0, 0x78, (NUM_EXPERTS, n, k // (2 if form.is_fp4 else 1)), dtype=np.uint8)
    columns = form.columns_per_scale or k // k_parts
    block_size = (1 if form.is_scale_per_row else 128, columns)
    size = (NUM_EXPERTS, n // block_size[0], k // block_size[1])
    is_byte = form.scale_bytes == 1
    scale = np.full(size, 110, np.uint8) if is_byte else np.full(size, 1e-5, np.float32)
    return prepare(values, scale, block_size, form.is_fp4, 2, k_parts, is_interleaved=k_parts == 1)


def counted(shape: ExpertShape, form: WeightForm, num_hit: int) -> Counts:
    w13 = make_weight(form, 2 * WIDTH, HIDDEN, 1)
    w2 = make_weight(form, HIDDEN, WIDTH, 2)
    size = (*([NUM_EXPERTS] if shape.has_own_rows else []), shape.num_rows, HIDDEN)
    kernel = grouped_experts if shape.has_own_rows else gated_experts
    arguments = {
        "x": np.ones(size, ml_dtypes.bfloat16),
        "w13_codes": w13.codes,
        "w13_scales": w13.scales,
        "w2_codes": w2.codes,
        "w2_scales": w2.scales,
        "row_weight": np.ones((NUM_EXPERTS, shape.num_rows), np.float32),
        "flags": np.array([[1] * num_hit + [0] * (NUM_EXPERTS - num_hit)], np.int32),
        "is_fp4": form.is_fp4,
        "swiglu_limit": shape.swiglu_limit,
    }
    return simulate(kernel, shape.num_cores, arguments).counts[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("num_rows", "limit"), [(1, 0.0), (9, 7.0), (33, 0.0), (128, 7.0)])
@pytest.mark.parametrize("has_own_rows", [False, True])
def test_costs_are_those_counted(
    name: str, num_rows: int, limit: float, has_own_rows: bool
) -> None:
    form = FORMS[name]
    shape = ExpertShape(num_rows, HIDDEN, WIDTH, limit, has_own_rows=has_own_rows)
    assert refusal(shape, form) is None
    base, each = base_cost(shape, NUM_EXPERTS), expert_cost(shape, form)
    for num_hit in (0, 2):
        counts = counted(shape, form, num_hit)
        assert base.hbm_bytes + num_hit * each.hbm_bytes == (
            counts.bytes_read() + counts.bytes_written()
        )
        for engine in ("tensor", "vector", "scalar", "gpsimd"):
            expected = base.cycles[engine] + num_hit * each.cycles[engine]
            assert math.isclose(counts.cycles[engine], expected), (engine, num_hit)


def test_bounds_follow_from_counts() -> None:
    shape, form = ExpertShape(8, HIDDEN, WIDTH), FORMS["fp8 128x128"]
    counts, base, each = counted(shape, form, 1), base_cost(shape, 2), expert_cost(shape, form)
    total = Tally()
    total.hbm_bytes = base.hbm_bytes + each.hbm_bytes
    total.cycles = base.cycles + each.cycles
    assert total.bounds_us() == pytest.approx(counts.bounds_us())


def test_calls_without_a_kernel_are_refused() -> None:
    form = FORMS["fp8 128x128"]
    assert "129 rows" in str(refusal(ExpertShape(129, HIDDEN, WIDTH), form))
    assert "not a multiple" in str(refusal(ExpertShape(1, HIDDEN, 200), form))
    assert "divide into 2" in str(refusal(ExpertShape(1, HIDDEN, 128), form))
