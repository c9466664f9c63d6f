"""Each rule of the emulator, broken by a small kernel."""

from collections.abc import Callable
from typing import Any

import pytest
from small_kernels import HWDGE, Kernel, matmul, psum, register, run, sbuf, store

from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator import language as nl
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError

BROKEN: list[tuple[Kernel, str]] = []


def breaks(message: str) -> Callable[[Kernel], Kernel]:
    def note(kernel: Kernel) -> Kernel:
        BROKEN.append((kernel, message))
        return kernel

    return note


# Memory.


@breaks("129 partitions")
def too_many_partitions(data: Any, flag: Any) -> None:
    nl.ndarray((129, 4), dtype=nl.float32, buffer=nl.sbuf)


@breaks("SBUF: 196612 bytes a partition live")
def too_much_sbuf(data: Any, flag: Any) -> None:
    first = nl.ndarray((1, 48 * 1024), dtype=nl.float32, buffer=nl.sbuf)
    nl.ndarray((first.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)


@breaks("PSUM: 9 banks live")
def too_many_banks(data: Any, flag: Any) -> None:
    tiles = []
    for _ in range(9):
        tiles.append(psum((128, 1)))


@breaks("read where nothing was written")
def uninitialised(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 8)), src=sbuf((128, 8), value=None))


@breaks("read where nothing was written")
def partly_initialised(data: Any, flag: Any) -> None:
    tile = sbuf((128, 8), value=None)
    nisa.memset(dst=tile[:, 0:7], value=0.0)
    nisa.tensor_copy(dst=sbuf((128, 8)), src=tile)


@breaks("partitions cannot be split or merged")
def reshaped_partitions(data: Any, flag: Any) -> None:
    sbuf((128, 8)).reshape((64, 16))


@breaks("partitions cannot be permuted")
def permuted_partitions(data: Any, flag: Any) -> None:
    sbuf((128, 8)).permute((1, 0))


@breaks("a broadcast view is written")
def written_broadcast(data: Any, flag: Any) -> None:
    nisa.memset(dst=sbuf((128, 1)).broadcast(1, 4), value=0.0)


@breaks("no truth value")
def branch_on_data(data: Any, flag: Any) -> None:
    if data:
        pass


@breaks("A slice from 0 to 300")
def slice_out_of_bounds(data: Any, flag: Any) -> None:
    data[:, 0:300]


@breaks("elements 0 to 32768 of 32768")
def pattern_out_of_bounds(data: Any, flag: Any) -> None:
    data.ap(pattern=[[256, 128], [1, 257]])


@breaks("A part of the output was never written")
def half_an_output(data: Any, flag: Any) -> Any:
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[:, 0:4], src=sbuf((128, 4)))
    return out


@breaks("returns one tensor, in shared_hbm")
def returned_sbuf(data: Any, flag: Any) -> Any:
    return sbuf((128, 4))


# Matrix products.


@breaks("say whether to accumulate")
def no_accumulate(data: Any, flag: Any) -> None:
    matmul(accumulate=None)


@breaks("PSUM that no matmul wrote")
def accumulate_first(data: Any, flag: Any) -> None:
    matmul(accumulate=True)


@breaks("PSUM that no matmul wrote")
def accumulate_on_memset(data: Any, flag: Any) -> None:
    dst = psum((128, 64))
    nisa.memset(dst=dst, value=0.0)
    matmul(dst=dst, accumulate=True)


@breaks("moving .* more than 512 columns")
def wide_moving(data: Any, flag: Any) -> None:
    matmul(dst=psum((128, 513)), moving=sbuf((128, 513), nl.bfloat16))


@breaks("stationary .* more than 128 columns")
def wide_stationary(data: Any, flag: Any) -> None:
    matmul(stationary=sbuf((128, 129), nl.bfloat16))


@breaks("contracts equal partitions")
def unequal_contraction(data: Any, flag: Any) -> None:
    matmul(moving=sbuf((64, 64), nl.bfloat16))


@breaks("float32 goes with float32 alone")
def mixed_with_fp32(data: Any, flag: Any) -> None:
    matmul(moving=sbuf((128, 64)))


@breaks("stationary is int32")
def integer_matmul(data: Any, flag: Any) -> None:
    matmul(stationary=sbuf((128, 128), nl.int32, 0))


@breaks("reads moving from SBUF")
def moving_in_psum(data: Any, flag: Any) -> None:
    matmul(moving=nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.psum))


@breaks("writes float32 to PSUM")
def result_in_sbuf(data: Any, flag: Any) -> None:
    matmul(dst=sbuf((128, 64)))


@breaks("writes float32 to PSUM")
def bf16_result(data: Any, flag: Any) -> None:
    matmul(dst=nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.psum))


@breaks("128 x 64 results")
def wrong_result_shape(data: Any, flag: Any) -> None:
    matmul(dst=psum((128, 65)))


@breaks("crosses a PSUM bank")
def result_across_banks(data: Any, flag: Any) -> None:
    matmul(dst=psum((128, 1024))[:, 500:564])


@breaks("go together")
def position_without_size(data: Any, flag: Any) -> None:
    matmul(tile_position=(0, 0))


@breaks("cannot start at row 16")
def misplaced_row_tile(data: Any, flag: Any) -> None:
    narrow = {
        name: sbuf((32, 128), nl.bfloat16)[:, 0:size]
        for name, size in (("stationary", 128), ("moving", 64))
    }
    matmul(**narrow, tile_position=(16, 0), tile_size=(32, 128))


@breaks("128 rows in a row tile of 32")
def tall_row_tile(data: Any, flag: Any) -> None:
    matmul(tile_position=(0, 0), tile_size=(32, 128))


@breaks("Row tiles alone")
def column_tile(data: Any, flag: Any) -> None:
    matmul(tile_position=(0, 0), tile_size=(128, 32))


@breaks("keeps the dtype")
def casting_transpose(data: Any, flag: Any) -> None:
    source = sbuf((128, 64), nl.bfloat16)
    nisa.nc_transpose(dst=psum((64, 128)), data=source, engine=nisa.engine.tensor)


@breaks("at most 128 x 128")
def large_transpose(data: Any, flag: Any) -> None:
    source = sbuf((128, 129))
    nisa.nc_transpose(dst=psum((128, 129)), data=source, engine=nisa.engine.tensor)


# Elementwise engines.


@breaks("240 was cast to float8_e4m3")
def fp8_overflow(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4), nl.float8_e4m3), src=sbuf((128, 4), value=241.0))


@breaks("57344 was cast to float8_e5m2")
def fp8_infinity(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4), nl.float8_e5m2), src=sbuf((128, 4), value=float("inf")))


@breaks("does not fit uint8")
def integer_overflow(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4), nl.uint8, 0), src=sbuf((128, 4), value=256.0))


@breaks("does not fit int32")
def nan_to_integer(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4), nl.int32, 0), src=sbuf((128, 4), value=float("nan")))


@breaks("Two operands are in PSUM")
def two_in_psum(data: Any, flag: Any) -> None:
    nisa.tensor_tensor(dst=sbuf((128, 4)), data1=psum((128, 4)), data2=psum((128, 4)), op=nl.add)


@breaks("GpSimd cannot reach PSUM")
def gpsimd_in_psum(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=psum((128, 4)), src=sbuf((128, 4)), engine=nisa.engine.gpsimd)


@breaks("SBUF and PSUM alone")
def compute_on_hbm(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 256)), src=data)


@breaks("Bit operations on float32")
def bits_of_floats(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4))
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=1)


@breaks("mixes bit operations and arithmetic")
def mixed_operators(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4), nl.int32, 0)
    nisa.tensor_scalar(
        dst=tile, data=tile, op0=nl.bitwise_and, operand0=1, op1=nl.add, operand1=1.0
    )


@breaks("no signed number here")
def unsigned_immediate(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4), nl.int32, 0)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.bitwise_and, operand0=0x80000000)


@breaks("vector engine alone")
def bits_on_gpsimd(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4), nl.int32, 0)
    nisa.tensor_tensor(
        dst=tile, data1=tile, data2=tile, op=nl.bitwise_or, engine=nisa.engine.gpsimd
    )


@breaks("Exact int32 arithmetic is GpSimd's")
def integers_on_vector(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4), nl.int32, 0)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add, engine=nisa.engine.vector)


@breaks("add of int32 overflows")
def integer_sum_overflow(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4), nl.int32, 2**30)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)


@breaks(r"is \(128, 1\) float32")
def integer_operand(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4))
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=sbuf((128, 1), nl.int32, 1))


@breaks("an int for integers, a float for floats")
def memset_class(data: Any, flag: Any) -> None:
    nisa.memset(dst=sbuf((128, 4), value=None), value=0)


@breaks("64, 128. partitions")
def unequal_partitions(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4)), src=sbuf((64, 8)))


@breaks("512, 640. elements")
def unequal_elements(data: Any, flag: Any) -> None:
    nisa.tensor_copy(dst=sbuf((128, 4)), src=sbuf((128, 5)))


@breaks("tensor_reduce over axis 1")
def reduced_middle(data: Any, flag: Any) -> None:
    nisa.tensor_reduce(dst=sbuf((128, 4)), op=nl.add, data=sbuf((128, 4, 4)), axis=1)


@breaks("A predicate is uint8")
def float_predicate(data: Any, flag: Any) -> None:
    tile = sbuf((128, 4))
    nisa.tensor_copy_predicated(dst=tile, src=tile, predicate=tile)


@breaks("works on 32 partitions")
def short_shuffle(data: Any, flag: Any) -> None:
    tile = sbuf((48, 4))
    nisa.nc_stream_shuffle(dst=tile, src=tile, shuffle_mask=[0] * 32)


# DMA and loops.


@breaks("DMA cannot reach PSUM")
def dma_to_psum(data: Any, flag: Any) -> None:
    nisa.dma_copy(dst=psum((128, 256)), src=data)


@breaks("DMA of 32768 elements to 32640")
def unequal_dma(data: Any, flag: Any) -> None:
    nisa.dma_copy(dst=sbuf((128, 255)), src=data)


@breaks("hwdge does not cast")
def casting_hwdge(data: Any, flag: Any) -> None:
    nisa.dma_copy(dst=sbuf((128, 256), nl.bfloat16), src=data, dge_mode=HWDGE)


@breaks("must name dge_mode.hwdge")
def static_dma_in_a_loop(data: Any, flag: Any) -> None:
    tile = sbuf((128, 256))
    nl.fori_loop(0, register(flag, 0), lambda _: nisa.dma_copy(dst=tile, src=data))


@breaks("A dynamic address needs dge_mode.hwdge")
def dynamic_without_hwdge(data: Any, flag: Any) -> None:
    source = data.ap(pattern=[[1, 1], [1, 256]], scalar_offset=register(flag, 2))
    nisa.dma_copy(dst=sbuf((1, 256)), src=source)


@breaks("multiple of 16, found 3")
def dynamic_three_partitions(data: Any, flag: Any) -> None:
    source = data.ap(pattern=[[1, 3], [1, 8]], scalar_offset=register(flag, 2))
    nisa.dma_copy(dst=sbuf((3, 8)), src=source, dge_mode=HWDGE)


@breaks("dynamic index 3 of 1")
def dynamic_index_out_of_bounds(data: Any, flag: Any) -> None:
    flag.ap(pattern=[[1, 1], [1, 1]], scalar_offset=register(flag, 2))


@breaks("made in a loop body and is used outside")
def value_escapes_a_loop(data: Any, flag: Any) -> None:
    made = []

    def body(_: Any) -> None:
        made.append(sbuf((128, 4)))

    nl.fori_loop(0, register(flag, 0), body)
    nisa.tensor_copy(dst=sbuf((128, 4)), src=made[0])


@breaks("used outside it, or in another trip")
def value_crosses_trips(data: Any, flag: Any) -> None:
    made: list[Any] = []

    def body(_: Any) -> None:
        made.append(sbuf((128, 4)))
        nisa.tensor_copy(dst=made[-1], src=made[0])

    nl.fori_loop(0, register(flag, 2), body)


@breaks("PSUM used in a loop body must be allocated")
def psum_from_outside(data: Any, flag: Any) -> None:
    dst = psum((128, 64))
    nl.fori_loop(0, register(flag, 0), lambda _: matmul(dst=dst))


@breaks("A loop body returns nothing")
def loop_returns(data: Any, flag: Any) -> None:
    nl.fori_loop(0, register(flag, 0), lambda _: 1)


@breaks("allocated outside of loops")
def hbm_in_a_loop(data: Any, flag: Any) -> None:
    def body(_: Any) -> None:
        nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)

    nl.fori_loop(0, register(flag, 0), body)


@breaks("before it was loaded")
def empty_register(data: Any, flag: Any) -> None:
    nl.fori_loop(0, nisa.register_alloc(), lambda _: None)


@breaks("A register holds an integer")
def float_register(data: Any, flag: Any) -> None:
    nisa.register_load(nisa.register_alloc(), sbuf((1, 1)))


@pytest.mark.parametrize(
    ("kernel", "message"), BROKEN, ids=[kernel.__name__ for kernel, _ in BROKEN]
)
def test_rule(kernel: Kernel, message: str) -> None:
    with pytest.raises(NkiRuleError, match=message):
        run(kernel)


def test_no_branch_on_a_register() -> None:
    def kernel(data: Any, flag: Any) -> None:
        if register(flag, 0):
            pass

    with pytest.raises(TypeError, match="no if, no arithmetic"):
        run(kernel)


def test_cores_must_take_equal_trips() -> None:
    def kernel(data: Any, flag: Any) -> Any:
        nl.fori_loop(0, register(flag, nl.program_id(axis=0)), lambda _: None)
        out = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[nl.program_id(axis=0)], src=sbuf((1, 8)))
        return out

    with pytest.raises(NkiRuleError, match="different trips"):
        run(kernel, num_cores=2)


def test_cores_must_not_write_the_same_output() -> None:
    with pytest.raises(NkiRuleError, match="Both cores wrote"):
        run(lambda data, flag: store(sbuf((128, 4))), num_cores=2)


def test_calls_outside_a_kernel() -> None:
    with pytest.raises(NkiRuleError, match="inside a kernel"):
        nl.ndarray((1, 1), dtype=nl.float32)
