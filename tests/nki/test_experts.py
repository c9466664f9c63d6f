"""Whole experts on chip against fp64 on the layer's own quantised numbers."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_runner import ACTIVATION, WEIGHTS, Result, prepare_raw, run_kernel
from oracle import rel_l2
from quantised_factory import QuantisedFixture, cast_of, make_quantised
from torch import Tensor

from vllm_moe_ep.quant.formats import FORMATS, QuantFormat
from vllm_moe_ep_kernels.nki.experts import gated_experts, grouped_experts, listed_experts
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight
from vllm_moe_ep_kernels.nki.swiglu import swiglu
from vllm_moe_ep_kernels.reference.swiglu import swiglu as reference_swiglu

each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)


@dataclass(frozen=True)
class Layer:
    """A fixture with its weights prepared and its routing as the kernels take it."""

    fixture: QuantisedFixture
    w13: PreparedWeight
    w2: PreparedWeight
    row_weight: Tensor
    num_cores: int = 2

    @property
    def num_experts(self) -> int:
        return self.row_weight.shape[0]

    @property
    def hit(self) -> Tensor:
        return (self.row_weight != 0).any(dim=1)

    def expected(self, limit: float | None = None) -> Tensor:
        return self.fixture.floats.routed(limit, cast_of(ACTIVATION))

    def run(self, kernel: Any, limit: float = 0.0, **routing: Any) -> Result:
        result = run_kernel(
            kernel,
            self.num_cores,
            x=routing.pop("x", self.fixture.floats.hidden_states),
            w13_codes=self.w13.codes,
            w13_scales=self.w13.scales,
            w2_codes=self.w2.codes,
            w2_scales=self.w2.scales,
            row_weight=self.row_weight,
            is_fp4=self.w13.is_fp4,
            swiglu_limit=limit,
            **routing,
        )
        return Result(result.output.sum(dim=0), result.run)

    def gated(self, flags: Tensor | None = None, limit: float = 0.0) -> Result:
        chosen = self.hit if flags is None else flags
        return self.run(gated_experts, limit, flags=chosen.to(torch.int32)[None].numpy())

    def listed(self, experts: list[int], limit: float = 0.0) -> Result:
        ids = np.zeros((1, self.num_experts), np.int32)
        ids[0, : len(experts)] = experts
        count = np.array([[len(experts)]], np.int32)
        return self.run(listed_experts, limit, expert_ids=ids, count=count)


def make_layer(fmt: QuantFormat, num_rows: int, num_experts: int = 4, num_cores: int = 2) -> Layer:
    fixture = make_quantised(fmt, num_rows, torch.bfloat16, 512, 512, num_experts)
    floats = fixture.floats
    ids = torch.arange(num_experts)[:, None, None]
    row_weight = ((floats.topk_ids == ids) * floats.topk_weights).sum(dim=2).contiguous()
    w13 = prepare_raw(fixture.w13, fmt, num_cores=num_cores, is_interleaved=True)
    w2 = prepare_raw(fixture.w2, fmt, num_cores=num_cores, k_parts=num_cores)
    return Layer(fixture, w13, w2, row_weight, num_cores)


def _without(layer: Layer, expert: int) -> Layer:
    """The same routing, but no row goes to this expert."""
    floats = layer.fixture.floats
    floats.topk_ids[floats.topk_ids == expert] = -1
    row_weight = layer.row_weight.clone()
    row_weight[expert] = 0
    return replace(layer, row_weight=row_weight)


@each_format
@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_gated(fmt: QuantFormat, num_rows: int) -> None:
    layer = _without(make_layer(fmt, num_rows), 2)
    result = layer.gated()
    assert rel_l2(result.output, layer.expected()) <= fmt.output_limit
    if result.run is None:
        return
    hit = int(layer.hit.sum())
    for name, weight in (("w13", layer.w13), ("w2", layer.w2)):
        codes = f"{name}_codes"
        wanted = hit * weight.codes[0].nbytes
        assert result.run.bytes_read(codes) == result.run.bytes_covered(codes) == wanted
    assert result.run.counts[0].trips == layer.hit.int().tolist()


@pytest.mark.parametrize("name", ["fp8_128x128", "fp4_1x32"])
def test_as_many_rows_as_fit(name: str) -> None:
    layer = make_layer(FORMATS[name], 128)
    assert rel_l2(layer.gated().output, layer.expected()) <= layer.fixture.fmt.output_limit


@pytest.mark.parametrize("name", ["fp8_128x128", "fp4_1x32"])
def test_one_core(name: str) -> None:
    layer = make_layer(FORMATS[name], 8, num_cores=1)
    assert rel_l2(layer.gated().output, layer.expected()) <= layer.fixture.fmt.output_limit


@pytest.mark.parametrize("limit", [0.05, 0.5])
def test_clamp(limit: float) -> None:
    layer = make_layer(FORMATS["fp8_128x128"], 8)
    assert rel_l2(layer.gated(limit=limit).output, layer.expected(limit)) <= 1e-2
    assert rel_l2(layer.gated().output, layer.expected(limit)) > 1e-2


@pytest.mark.parametrize("name", ["fp8_128x128", "fp8_1x32_ue8m0", "fp4_1x32"])
@pytest.mark.parametrize("experts", [[], [3], [2, 0], [1, 3, 0, 2]])
def test_listed_equals_gated(name: str, experts: list[int]) -> None:
    layer = make_layer(FORMATS[name], 8)
    flags = torch.zeros(4, dtype=torch.int32)
    flags[experts] = 1
    listed, gated = layer.listed(experts), layer.gated(flags)
    torch.testing.assert_close(listed.output, gated.output, rtol=1e-5, atol=1e-5)
    if not experts:
        assert torch.equal(listed.output, torch.zeros_like(listed.output))
    if listed.run is not None and gated.run is not None:
        assert listed.run.counts[1].trips == [len(experts)]
        for weights in ("w13_codes", "w13_scales", "w2_codes", "w2_scales"):
            assert listed.run.bytes_read(weights) == gated.run.bytes_read(weights)


@pytest.mark.parametrize("name", ["fp8_128x128", "fp8_1x32_ue8m0", "fp4_1x32"])
@pytest.mark.parametrize("num_rows", [3, 40])
@pytest.mark.parametrize("num_cores", [1, 2])
def test_grouped(name: str, num_rows: int, num_cores: int) -> None:
    """Rows of each expert's own: the same rows for all give what the shared ones sum to."""
    layer = _without(make_layer(FORMATS[name], num_rows, num_cores=num_cores), 2)
    rows = layer.fixture.floats.hidden_states.expand(4, -1, -1).contiguous()
    own = replace(layer, row_weight=layer.row_weight[:, torch.randperm(num_rows)].contiguous())
    result = own.run(grouped_experts, x=rows, flags=own.hit.to(torch.int32)[None].numpy())
    assert (result.output[2] == 0).all()
    torch.testing.assert_close(result.output.sum(dim=0), own.gated().output, rtol=1e-5, atol=1e-5)
    first = replace(own, row_weight=own.row_weight * torch.tensor([1.0, 0, 0, 0])[:, None])
    torch.testing.assert_close(result.output[0], first.gated().output, rtol=1e-5, atol=1e-5)
    if result.run is not None:
        assert result.run.counts[0].trips == [1, 0, 1, 0, 0, 1, 1, 0]
        assert result.run.bytes_read("w2_codes") == 3 * layer.w2.codes[0].nbytes


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_routed_get_zeros_whatever_they_hold(value: float) -> None:
    layer = make_layer(FORMATS["fp8_128x128"], 6)
    layer.row_weight[:, 4] = 0
    clean = layer.gated().output
    assert torch.equal(clean[4], torch.zeros(512))
    layer.fixture.floats.hidden_states[4, ::7] = value
    assert torch.equal(layer.gated().output, clean)


def test_a_forced_gate_changes_nothing_but_the_reading() -> None:
    layer = _without(make_layer(FORMATS["fp8_128x128"], 4), 1)
    forced = layer.gated(torch.ones(4, dtype=torch.int32))
    assert torch.equal(forced.output, layer.gated().output)
    if forced.run is not None:
        assert forced.run.bytes_covered("w2_codes") == layer.w2.codes.nbytes


@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_swiglu(limit: float | None, num_rows: int) -> None:
    gate_up, row_weight = 3 * torch.randn(num_rows, 128), torch.rand(num_rows)
    row_weight[0] = 0
    result = run_kernel(
        swiglu, 2, gate_up=gate_up, row_weight=row_weight[:, None], swiglu_limit=limit or 0.0
    )
    expected = reference_swiglu(gate_up.double(), row_weight, limit, torch.float64)
    torch.testing.assert_close(result.output.double(), expected, rtol=1e-3, atol=1e-5)
    assert (result.output[0] == 0).all()
