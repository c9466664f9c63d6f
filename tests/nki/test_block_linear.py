"""The linear kernels against fp64 on the layer's own quantised numbers."""

import numpy as np
import pytest
import quant_oracle
import torch
from kernel_runner import ACTIVATION, WEIGHTS, prepare_raw, run_kernel
from oracle import rel_l2
from quantised_factory import cast_of, random_matrix
from torch import Tensor

from vllm_moe_ep.quant.formats import FORMATS, QuantFormat
from vllm_moe_ep_kernels.nki.block_linear import block_linear, gated_block_linear
from vllm_moe_ep_kernels.nki.cast import load_rows
from vllm_moe_ep_kernels.nki.convert import expand_fp4
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_api import nisa, nl
from vllm_moe_ep_kernels.reference.dequantise import dequantise
from vllm_moe_ep_kernels.reference.quantise import quantise

CAST = cast_of(ACTIVATION)
each_format = pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)


def _arguments(weight: PreparedWeight, expert: int = 0) -> dict[str, object]:
    return {
        "codes": weight.codes,
        "scales": weight.scales,
        "expert": expert,
        "is_fp4": weight.is_fp4,
        "is_interleaved": weight.is_interleaved,
    }


def _expected(rows: Tensor, weight: Tensor) -> Tensor:
    assert CAST is not None
    return CAST(rows.double()) @ weight.T


@each_format
@pytest.mark.parametrize("num_rows", [1, 8, 16, 33, 127, 128, 129, 300])
def test_values(fmt: QuantFormat, num_rows: int) -> None:
    n, k = 512, 384
    matrix = random_matrix(fmt, (2,), n, k)
    rows = torch.randn(num_rows, k).to(torch.bfloat16)
    weight = prepare_raw(matrix, fmt)
    result = run_kernel(block_linear, 2, x=rows, **_arguments(weight, 1))
    exact = quant_oracle.dequantise(matrix.values[1], matrix.scale[1], *fmt.block_size)
    assert rel_l2(result.output, _expected(rows, exact)) <= 1e-3


@pytest.mark.parametrize(("n", "k"), [(256, 512), (256, 128)])
def test_scales_of_32_columns_that_were_joined(n: int, k: int) -> None:
    """As bytes, and as fp32 where they do not fill lanes of four."""
    fmt = FORMATS["fp8_1x32_ue8m0"]
    codes = torch.randint(0x28, 0x78, (1, n, k), dtype=torch.uint8)
    scale = torch.randint(112, 115, (1, n, k // 32), dtype=torch.uint8)
    weight = prepare(codes.numpy(), scale.numpy(), fmt.block_size, is_fp4=False)
    assert weight.scales.shape[-1] == n // 128 * k // 128
    rows = torch.randn(9, k)
    result = run_kernel(block_linear, 2, x=rows, **_arguments(weight))
    exact = quant_oracle.dequantise(codes[0].view(torch.float8_e4m3fn), scale[0], *fmt.block_size)
    assert rel_l2(result.output, _expected(rows, exact)) <= 1e-3


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("k_parts", [1, 2])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("name", ["fp8_128x128", "fp4_1x32"])
def test_layouts(name: str, num_cores: int, k_parts: int, is_interleaved: bool) -> None:
    fmt = FORMATS[name]
    matrix = random_matrix(fmt, (1,), 512, 256)
    rows = torch.randn(5, 256)
    weight = prepare_raw(
        matrix, fmt, num_cores=num_cores, k_parts=k_parts, is_interleaved=is_interleaved
    )
    result = run_kernel(block_linear, num_cores, x=rows, **_arguments(weight))
    exact = quant_oracle.dequantise(matrix.values[0], matrix.scale[0], *fmt.block_size)
    assert rel_l2(result.output, _expected(rows, exact)) <= 1e-3


@pytest.mark.parametrize("num_rows", [2, 40])
@pytest.mark.parametrize("k_parts", [1, 2])
def test_a_scale_per_channel(num_rows: int, k_parts: int) -> None:
    n, k = 256, 512
    values = (100 * torch.randn(1, n, k)).clamp(-240, 240).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randn(1, n, 1)) / 1000
    codes = values.view(torch.uint8).numpy()
    spread = scale.expand(-1, -1, k_parts).contiguous().numpy()
    weight = prepare(codes, spread, (1, k // k_parts), is_fp4=False, k_parts=k_parts)
    rows = torch.randn(num_rows, k)
    result = run_kernel(block_linear, 2, x=rows, **_arguments(weight))
    exact = quant_oracle.dequantise(values[0], scale[0], 1, k)
    assert rel_l2(result.output, _expected(rows, exact)) <= 1e-3
    own = run_kernel(block_linear, 2, x=torch.eye(k)[:n], **_arguments(weight))
    assert torch.equal(own.output.T.double(), exact[:, :n].float().double())


@each_format
def test_dequantisation_is_bit_exact(fmt: QuantFormat) -> None:
    """Rows of the identity bring the weight's own numbers out, each by one product in fp32."""
    matrix = random_matrix(fmt, (1,), 512, 256)
    weight = prepare_raw(matrix, fmt)
    result = run_kernel(block_linear, 2, x=torch.eye(256), **_arguments(weight))
    exact = dequantise(matrix.values[0], matrix.scale[0], fmt.block_size)
    differs = result.output.T != exact
    assert int(differs.sum()) == weight.num_inexact
    if not fmt.is_fp4:
        codes = matrix.values[0].view(torch.uint8)[differs] & 0x7F
        assert (codes < 16).all() and (codes % 2 == 1).all()


def test_expanded_fp4_is_bit_exact() -> None:
    fmt = FORMATS["fp4_1x32"]
    matrix = random_matrix(fmt, (1,), 256, 512)
    values, scale, num_inexact = expand_fp4(matrix.values.numpy(), matrix.scale.numpy())
    weight = prepare(values, scale, (1, 128), is_fp4=False)
    result = run_kernel(block_linear, 2, x=torch.eye(512)[:300], **_arguments(weight))
    exact = dequantise(matrix.values[0], matrix.scale[0], fmt.block_size)
    assert num_inexact == weight.num_inexact == 0
    assert torch.equal(result.output.T, exact[:, :300])


def _hard_rows() -> Tensor:
    """Rows whose blocks are at the edges of the scale's rule, or hold what no rule covers."""
    # Neighbouring blocks differ so much that a scale for both would flush one of them.
    sizes = torch.exp2(torch.randint(-60, 60, (24, 8, 1)).float())
    rows = (torch.randn(24, 8, 32) * sizes).reshape(24, 256)
    largest = torch.tensor([240.0, 120.0, 15.0, 241.0, 1.875, 448.0, 2.0**-100, 0.0])
    # The rest of a block is so small that it is stored in subnormals: there the scale shows.
    after = torch.nextafter(largest[:3], torch.full((3,), torch.inf))
    largest = torch.cat([largest, -after])
    rows[:11] = (torch.randn(11, 256) * largest[:, None] * 2.0**-15).clamp(-0.01, 0.01)
    rows[:11, 5::32] = largest[:, None]
    # All bits set, as rows are padded: no payload of a NaN is larger.
    rows[11, 40] = torch.tensor([-1], dtype=torch.int32).view(torch.float32)
    rows[12, 70] = torch.inf
    return rows


def test_cast_is_that_of_the_reference() -> None:
    rows = _hard_rows()

    def kernel(x):  # type: ignore[no-untyped-def]
        tile = load_rows(x)
        out = nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    result = run_kernel(kernel, 1, x=rows)
    expected = dequantise(*quantise(rows, (1, 32), 240.0, True, False), (1, 32))
    actual = result.output.permute(2, 1, 0).reshape(rows.shape)
    is_known = (torch.arange(24) != 11) & (torch.arange(24) != 12)
    assert torch.equal(actual[is_known], expected[is_known])
    # A NaN stays within its row; the reference makes all of its block NaN. Infinity becomes one.
    assert actual[11, 40].isnan() and expected[11, 40].isnan()
    assert actual[12, 70].isnan() and expected[12, 70].isnan()


@each_format
@pytest.mark.parametrize("flag", [0, 1, 5, -1])
def test_gate(fmt: QuantFormat, flag: int) -> None:
    matrix = random_matrix(fmt, (1,), 512, 256)
    rows = torch.randn(3, 256)
    weight = prepare_raw(matrix, fmt)
    flags = np.array([[flag]], np.int32)
    result = run_kernel(gated_block_linear, 2, x=rows, flag=flags, **_arguments(weight))
    if flag == 0:
        assert torch.equal(result.output, torch.zeros(3, 512))
    else:
        plain = run_kernel(block_linear, 2, x=rows, **_arguments(weight))
        assert torch.equal(result.output, plain.output)
    if result.run is not None:
        assert result.run.counts[0].trips == [int(flag != 0)]
        read = result.run.bytes_read("codes")
        assert read == result.run.bytes_covered("codes") == (weight.codes.nbytes if flag else 0)
        assert (result.run.bytes_read("scales") == 0) == (flag == 0)


def test_a_nan_row_spoils_no_other() -> None:
    fmt = FORMATS["fp8_128x128"]
    matrix = random_matrix(fmt, (1,), 256, 256)
    rows = torch.randn(6, 256)
    clean = run_kernel(block_linear, 2, x=rows, **_arguments(prepare_raw(matrix, fmt))).output
    rows[2] = torch.nan
    spoilt = run_kernel(block_linear, 2, x=rows, **_arguments(prepare_raw(matrix, fmt))).output
    others = torch.arange(6) != 2
    assert torch.equal(spoilt[others], clean[others])
    assert spoilt[2].isnan().all()
