"""The narrow interface: the torch host path and the NKI kernels by one body; layers on both."""

from collections.abc import Iterator

import pytest
import quant_oracle
import torch
from kernel_runner import ACTIVATION, WEIGHTS
from layer_factory import config_of
from oracle import rel_l2
from quantised_factory import QuantisedFixture, cast_of, make_quantised, random_matrix

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.kernel_experts import KernelExperts
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import LocalExperts
from vllm_moe_ep.quant.formats import FORMATS, QuantFormat
from vllm_moe_ep_kernels.host.linears import HostLinears
from vllm_moe_ep_kernels.linears import Linears
from vllm_moe_ep_kernels.nki import ops
from vllm_moe_ep_kernels.nki.linears import NkiLinears
from vllm_moe_ep_kernels.reference.swiglu import swiglu as reference_swiglu

CAST = cast_of(ACTIVATION)
LINEARS: list[Linears] = [HostLinears(240.0), NkiLinears()]
each_linears = pytest.mark.parametrize("linears", LINEARS, ids=["host", "nki"])
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_linears
@each_format
@pytest.mark.parametrize("num_rows", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(linears: Linears, fmt: QuantFormat, num_rows: int, dtype: torch.dtype) -> None:
    matrix = random_matrix(fmt, (2,), 512, 256)
    rows = torch.randn(num_rows, 256).to(dtype)
    assert linears.has_kernel(512, 256, fmt.block_size, fmt.is_fp4)
    weight = linears.prepare(matrix.values, matrix.scale, fmt.block_size)
    exact = quant_oracle.dequantise(matrix.values[1], matrix.scale[1], *fmt.block_size)
    assert CAST is not None
    expected = CAST(rows.double()) @ exact.T
    assert rel_l2(linears.linear(rows, weight, 1), expected) <= 1e-3
    for flag in (0, 1):
        gated = linears.linear_gated(rows, weight, 1, torch.tensor([[flag]], dtype=torch.int32))
        assert rel_l2(gated, expected * flag) <= 1e-3
    own = linears.prepare(matrix.values[1:], matrix.scale[1:], fmt.block_size)
    assert torch.equal(linears.linear_raw(rows, own), linears.linear(rows, weight, 1))


def test_more_rows_than_one_kernel_takes() -> None:
    fmt = FORMATS["fp8_128x128"]
    matrix = random_matrix(fmt, (1,), 256, 128)
    rows = torch.randn(700, 128)
    weights = [linears.prepare(matrix.values, matrix.scale, fmt.block_size) for linears in LINEARS]
    host, nki = (
        linears.linear(rows, weight, 0) for linears, weight in zip(LINEARS, weights, strict=True)
    )
    assert rel_l2(nki, host) <= 1e-3


@each_linears
@pytest.mark.parametrize("limit", [None, 0.5])
def test_swiglu(linears: Linears, limit: float | None) -> None:
    gate_up, row_weight = torch.randn(6, 256), torch.rand(6)
    row_weight[2], gate_up[2] = 0, torch.nan
    actual = linears.swiglu(gate_up, row_weight, limit)
    others = torch.arange(6) != 2
    expected = reference_swiglu(gate_up, row_weight, limit, torch.float32)
    torch.testing.assert_close(actual[others], expected[others], rtol=1e-4, atol=1e-6)
    assert (actual[2] == 0).all()


def _layer(fixture: QuantisedFixture, linears: Linears, strategy: str) -> EPLayer:
    config = config_of(fixture.floats)
    num_experts = config.num_experts
    experts = KernelExperts(
        linears,
        fixture.w13.values,
        fixture.w13.scale,
        fixture.w2.values,
        fixture.w2.scale,
        config,
        fixture.fmt.block_size,
    )
    return strategy_layer(
        config,
        LocalExperts(num_experts, tuple(range(num_experts))),
        experts,
        SingleProcess(),
        EPConfig(host_mode=False, experts=strategy),
    )


@each_linears
@each_format
@pytest.mark.parametrize("strategy", ["dense", "gated"])
def test_layer(linears: Linears, fmt: QuantFormat, strategy: str) -> None:
    fixture = make_quantised(fmt, 6, torch.bfloat16, 512, 256, 4)
    floats = fixture.floats
    step = _layer(fixture, linears, strategy).step(
        floats.hidden_states, floats.topk_ids, floats.topk_weights, capacity=6
    )
    expected = floats.routed(cast=cast_of(ACTIVATION))
    assert rel_l2(step.hidden_states, expected) <= fmt.output_limit


def test_a_step_with_kernels_is_one_graph() -> None:
    fixture = make_quantised(FORMATS["fp8_128x128"], 5, torch.bfloat16, 256, 256, 4)
    layer, floats = _layer(fixture, NkiLinears(), "gated"), fixture.floats

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        return layer.step(*arguments, capacity=5).hidden_states

    arguments = (floats.hidden_states, floats.topk_ids, floats.topk_weights)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), step(*arguments))


def test_ops_are_valid() -> None:
    fmt = FORMATS["fp8_128x128"]
    matrix = random_matrix(fmt, (1,), 256, 128)
    weight = NkiLinears().prepare(matrix.values, matrix.scale, fmt.block_size)
    rows, flag = torch.randn(3, 128), torch.ones(1, 1, dtype=torch.int32)
    static = (0, 256, False, False, 2)
    parts = (rows, weight.codes, weight.scales)
    torch.library.opcheck(ops.nki_block_linear, (*parts, None, *static))
    torch.library.opcheck(ops.nki_block_linear, (*parts, flag, *static))
    torch.library.opcheck(ops.nki_swiglu, (torch.randn(3, 128), torch.rand(3), 0.5, 2))


def test_experts_op() -> None:
    """More rows than one kernel takes are taken in turns, and the cores' sums are added."""
    fmt = FORMATS["fp8_128x128"]
    fixture = make_quantised(fmt, 130, torch.bfloat16, 256, 256, 4)
    floats, nki = fixture.floats, NkiLinears()
    w13 = nki.lay_out(fixture.w13.values, fixture.w13.scale, fmt.block_size, is_interleaved=True)
    w2 = nki.lay_out(fixture.w2.values, fixture.w2.scale, fmt.block_size, k_parts=2)
    weights = [torch.from_numpy(part) for part in (w13.codes, w13.scales, w2.codes, w2.scales)]
    ids = torch.arange(4)[:, None, None]
    row_weight = ((floats.topk_ids == ids) * floats.topk_weights).sum(dim=2)
    flags = torch.ones(1, 4, dtype=torch.int32)
    parts = (floats.hidden_states, *weights, row_weight)
    expected = floats.routed(cast=cast_of(ACTIVATION))
    gated = ops.nki_experts(*parts, flags, False, 0.0, 2)
    assert rel_l2(gated, expected) <= fmt.output_limit
    listed = ops.nki_experts(*parts, flags, False, 0.0, 2, is_list=True)
    torch.testing.assert_close(listed, gated, rtol=1e-5, atol=1e-5)
    own = floats.hidden_states.expand(4, -1, -1)
    grouped = ops.nki_experts(own, *weights, row_weight, flags, False, 0.0, 2)
    torch.testing.assert_close(grouped.sum(dim=0), gated, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rows of their own"):
        ops.nki_experts(own, *weights, row_weight, flags, False, 0.0, 2, is_list=True)
    few = (floats.hidden_states[:3], *weights, row_weight[:, :3])
    torch.library.opcheck(ops.nki_experts, (*few, flags, False, 0.0, 2))
    torch.library.opcheck(ops.nki_experts, (*few, flags, False, 0.0, 2, True))


def test_hit_list() -> None:
    ids, count = ops.hit_list(torch.tensor([[0, 1, 0, 1, 1]], dtype=torch.int32))
    assert ids.tolist() == [[1, 3, 4, 0, 2]] and count.tolist() == [[3]]
    assert ids.dtype is count.dtype is torch.int32


def test_sizes_without_a_kernel_are_refused() -> None:
    fixture = make_quantised(FORMATS["fp8_128x128"], 2, torch.bfloat16, 192, 128, 4)
    with pytest.raises(UnsupportedError, match="No kernel for an expert weight of 256 x 192"):
        _layer(fixture, NkiLinears(), "dense")
