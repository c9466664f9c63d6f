"""What the emulator computes and counts, against NumPy."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator import language as nl
from vllm_moe_ep_kernels.nki_emulator.simulate import simulate


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _load(source: Any, dtype: Any = nl.float32) -> Any:
    tile = nl.ndarray(source.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def _store(tile: Any) -> Any:
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def test_matmul_of_mixed_formats_accumulates(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((128, 32)).astype(ml_dtypes.float8_e4m3)
    rows = rng.standard_normal((128, 40)).astype(ml_dtypes.bfloat16)

    def kernel(weight: Any, rows: Any) -> Any:
        stationary, moving = _load(weight, weight.dtype), _load(rows, rows.dtype)
        sums = nl.ndarray((32, 40), dtype=nl.float32, buffer=nl.psum)
        for trip in range(3):
            nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=trip > 0)
        copied = nl.ndarray((32, 40), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copied, src=sums)
        return _store(copied)

    run = simulate(kernel, 1, {"weight": weight, "rows": rows})
    expected = 3 * weight.astype(np.float64).T @ rows.astype(np.float64)
    np.testing.assert_allclose(run.output, expected, rtol=1e-4, atol=1e-4)
    counts = run.counts[0]
    assert counts.cycles["tensor"] == 3 * 64
    assert counts.bytes_read() == 128 * 32 + 128 * 40 * 2
    assert counts.bytes_written() == 32 * 40 * 4
    assert counts.peak_psum_banks == 1


def test_casts_round_to_nearest_even(rng: np.random.Generator) -> None:
    numbers = np.concatenate([rng.uniform(-240, 240, 250), [0.5, 1.5, 2.5, -0.5, 17.0, 19.0]])
    numbers = np.tile(numbers.astype(np.float32), (2, 1))

    def kernel(numbers: Any) -> Any:
        tile = _load(numbers)
        out = nl.ndarray((3, 2, 256), dtype=nl.float32, buffer=nl.shared_hbm)
        for place, dtype in enumerate((nl.float8_e4m3, nl.bfloat16, nl.int32)):
            narrow = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=narrow, src=tile)
            wide = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=wide, src=narrow)
            nisa.dma_copy(dst=out[place], src=wide)
        return out

    output = simulate(kernel, 1, {"numbers": numbers}).output
    for place, dtype in enumerate((ml_dtypes.float8_e4m3, ml_dtypes.bfloat16)):
        np.testing.assert_array_equal(output[place], numbers.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(output[2], np.rint(numbers))


def test_every_fp8_code_is_read_as_ml_dtypes_reads_it() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256)

    def kernel(codes: Any) -> Any:
        tile = _load(codes, nl.uint8)
        out = nl.ndarray((2, 1, 256), dtype=nl.float32, buffer=nl.shared_hbm)
        for place, dtype in enumerate((nl.float8_e4m3, nl.float8_e5m2)):
            wide = nl.ndarray((1, 256), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=wide, src=tile.view(dtype))
            nisa.dma_copy(dst=out[place], src=wide)
        return out

    output = simulate(kernel, 1, {"codes": codes}).output
    for place, dtype in enumerate((ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2)):
        np.testing.assert_array_equal(output[place], codes.view(dtype).astype(np.float32))


def test_integers_are_exact_on_gpsimd_alone(rng: np.random.Generator) -> None:
    numbers = rng.integers(2**25, 2**30, (4, 8)).astype(np.int32) | 1

    def kernel(numbers: Any) -> Any:
        tile = _load(numbers, nl.int32)
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)
        return _store(tile)

    run = simulate(kernel, 1, {"numbers": numbers})
    np.testing.assert_array_equal(run.output, 2 * numbers)
    assert run.counts[0].instructions["gpsimd"] == 1

    def through_fp32(numbers: Any) -> Any:
        tile = _load(numbers, nl.int32)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=0.0)
        return _store(tile)

    rounded = simulate(through_fp32, 1, {"numbers": numbers}).output
    np.testing.assert_array_equal(rounded, numbers.astype(np.float32).astype(np.int32))
    assert (rounded != numbers).any()


def test_shifts_are_logical(rng: np.random.Generator) -> None:
    numbers = rng.integers(-(2**31), 2**31, (4, 8)).astype(np.int32)

    def kernel(numbers: Any) -> Any:
        tile = _load(numbers, nl.int32)
        nisa.tensor_scalar(
            dst=tile, data=tile, op0=nl.right_shift, operand0=3, op1=nl.bitwise_and, operand1=-2
        )
        return _store(tile)

    output = simulate(kernel, 1, {"numbers": numbers}).output
    expected = numbers.view(np.uint32) >> 3 & ~np.uint32(1)
    np.testing.assert_array_equal(output.view(np.uint32), expected)


def test_transpose_keeps_nan_bits(rng: np.random.Generator) -> None:
    data = rng.integers(0, 2**16, (96, 80)).astype(np.uint16).view(ml_dtypes.bfloat16)

    def kernel(data: Any) -> Any:
        turned = nl.ndarray((80, 96), dtype=nl.bfloat16, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=_load(data, nl.bfloat16), engine=nisa.engine.tensor)
        copied = nl.ndarray((80, 96), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copied, src=turned)
        return _store(copied)

    output = simulate(kernel, 1, {"data": data}).output
    np.testing.assert_array_equal(output.view(np.uint16), data.view(np.uint16).T)


def test_elementwise_values(rng: np.random.Generator) -> None:
    data = rng.standard_normal((64, 4, 8)).astype(np.float32)
    factor = rng.standard_normal((64, 1)).astype(np.float32)

    def kernel(data: Any, factor: Any) -> Any:
        tile, per_row = _load(data), _load(factor)
        out = nl.ndarray((64, 3, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        work = nl.ndarray((64, 4, 8), dtype=nl.float32, buffer=nl.sbuf)
        reduced = nl.ndarray((64, 3, 4), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=work, data=tile, op0=nl.multiply, operand0=per_row, op1=nl.subtract, operand1=tile
        )
        nisa.tensor_reduce(dst=reduced[:, 0], op=nl.maximum, data=work, axis=2)
        nisa.activation(dst=work, op=nl.silu, data=tile, scale=per_row)
        nisa.tensor_reduce(dst=reduced[:, 1], op=nl.add, data=work, axis=2)
        nisa.nc_stream_shuffle(dst=work, src=tile, shuffle_mask=[5] * 32)
        nisa.tensor_reduce(dst=reduced[:, 2], op=nl.add, data=work, axis=2)
        nisa.dma_copy(dst=out, src=reduced)
        return out

    run = simulate(kernel, 1, {"data": data, "factor": factor})
    wide = data.astype(np.float64)
    scaled = wide * factor[:, :, None]
    silu = scaled / (1 + np.exp(-scaled))
    shuffled = wide[np.repeat([5, 37], 32)]
    expected: list[NDArray] = [
        (wide * factor[:, :, None] - wide).max(-1),
        silu.sum(-1),
        shuffled.sum(-1),
    ]
    np.testing.assert_allclose(run.output, np.stack(expected, axis=1), rtol=1e-4, atol=1e-4)
    # Three reductions of 32 elements and one product, one shuffle: the floor of 64 each.
    assert run.counts[0].cycles["vector"] == 5 * trainium2.MIN_CYCLES


def test_selection_keeps_nan_out() -> None:
    data = np.full((8, 4), np.nan, np.float32)

    def kernel(data: Any) -> Any:
        tile = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=2.0)
        never = nl.ndarray((8, 4), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.memset(dst=never, value=0)
        nisa.tensor_copy_predicated(dst=tile, src=_load(data), predicate=never)
        return _store(tile)

    assert (simulate(kernel, 1, {"data": data}).output == 2.0).all()


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_loops_with_dynamic_addresses(rng: np.random.Generator, trips: int) -> None:
    data = rng.standard_normal((5, 16, 8)).astype(np.float32)
    order = np.array([[4, 0, 2]], np.int32)

    def kernel(data: Any, order: Any, count: Any) -> Any:
        total = nl.ndarray((16, 8), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        upper = nisa.register_alloc()
        nisa.register_load(upper, _load(count, nl.int32))

        def body(visit: Any) -> None:
            index = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
            source = order.ap(pattern=[[1, 1], [1, 1]], scalar_offset=visit, indirect_dim=1)
            nisa.dma_copy(dst=index, src=source, dge_mode=nisa.dge_mode.hwdge)
            tile = nl.ndarray((16, 8), dtype=nl.float32, buffer=nl.sbuf)
            source = data.ap(pattern=[[8, 16], [1, 8]], scalar_offset=index, indirect_dim=0)
            nisa.dma_copy(dst=tile, src=source, dge_mode=nisa.dge_mode.hwdge)
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

        nl.fori_loop(0, upper, body)
        return _store(total)

    arguments = {"data": data, "order": order, "count": np.array([[trips]], np.int32)}
    run = simulate(kernel, 1, arguments)
    expected = data[order[0, :trips]].sum(axis=0)
    np.testing.assert_allclose(run.output, expected, rtol=1e-5, atol=1e-5)
    assert run.counts[0].trips == [trips]
    assert run.bytes_read("data") == run.bytes_covered("data") == trips * 16 * 8 * 4


def test_transfers_are_described(rng: np.random.Generator) -> None:
    data = rng.standard_normal((128, 64)).astype(np.float32)

    def kernel(data: Any) -> Any:
        tile = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile[:, 0:32], src=data[:, 32:64])
        nisa.dma_copy(dst=tile[:, 32:64], src=data.ap(pattern=[[0, 128], [1, 32]]))
        return _store(tile)

    run = simulate(kernel, 1, {"data": data})
    strided, spread, stored = run.counts[0].transfers
    assert (strided.num_bytes, strided.bytes_per_partition) == (16384, 128)
    assert strided.chunk_bytes == 128
    assert strided.num_descriptors == 128
    # The broadcast reads one row 128 times.
    assert spread.num_bytes == 16384
    assert run.bytes_covered("data") == 16384 + 128
    assert not stored.is_read and stored.chunk_bytes == 256
    np.testing.assert_array_equal(run.output[:, 32:], np.tile(data[0, :32], (128, 1)))


def test_row_tiles_run_side_by_side() -> None:
    def kernel(data: Any) -> Any:
        tile = _load(data)
        sums = nl.ndarray((16, 4, 16), dtype=nl.float32, buffer=nl.psum)
        for part in range(4):
            rows = tile[32 * part : 32 * part + 32, :]
            nisa.nc_matmul(
                dst=sums[:, part, :],
                stationary=rows,
                moving=rows,
                accumulate=False,
                tile_position=(32 * part, 0),
                tile_size=(32, 128),
            )
        copied = nl.ndarray((16, 4, 16), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=copied, src=sums)
        return _store(copied)

    data = np.arange(128 * 16, dtype=np.float32).reshape(128, 16) / 100
    run = simulate(kernel, 1, {"data": data})
    parts = data.reshape(4, 32, 16).astype(np.float64)
    expected = np.einsum("pkn,pkr->npr", parts, parts)
    np.testing.assert_allclose(run.output, expected, rtol=1e-5)
    # fp32 takes four passes of 16 columns, the floor of 64 cycles.
    assert run.counts[0].cycles["tensor"] == 64
    assert run.counts[0].serial_tensor_cycles == 4 * 64


def test_bounds_and_the_critical_one() -> None:
    def kernel(data: Any) -> Any:
        return _store(_load(data))

    run = simulate(kernel, 1, {"data": np.zeros((128, 8192), np.float32)})
    bounds = run.counts[0].bounds_us()
    moved = 2 * 128 * 8192 * 4
    assert bounds["hbm"] == pytest.approx(moved / 362500)
    assert run.counts[0].critical() == ("hbm", bounds["hbm"])
    assert run.counts[0].peak_sbuf_bytes == 8192 * 4
