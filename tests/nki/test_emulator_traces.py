"""What a device would compile otherwise than Python runs it: loops, Python state, cores, inputs.

Each rule is broken by a small kernel.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_kernels import HWDGE, Kernel, matmul, register, run, sbuf, store

from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator import language as nl
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError

OUTSIDE = "made in a loop body and is used outside"
TRACED_ONCE = "when it was traced again"
CORES_DIFFER = "cores of a logical core issued different instructions"
# flag is [1, 0, 3]: a register of its place 0 gives one trip, of place 1 none, of place 2 three.
ONE, NONE, THREE = 0, 1, 2
each_trips = pytest.mark.parametrize("trips", [ONE, NONE, THREE], ids=["one", "none", "three"])


def refuses(kernel: Kernel, message: str, num_cores: int = 1) -> None:
    with pytest.raises(NkiRuleError, match=message):
        run(kernel, num_cores)


def loop(flag: Any, trips: int, body: Callable[[Any], None]) -> None:
    nl.fori_loop(0, register(flag, trips), body)


# Registers end with the loop body they were made in.


def test_a_loop_index_outside_its_loop() -> None:
    def kernel(data: Any, flag: Any) -> None:
        indices: list[Any] = []
        loop(flag, ONE, indices.append)
        flag.ap(pattern=[[1, 1], [1, 1]], scalar_offset=indices[-1], indirect_dim=1)

    refuses(kernel, OUTSIDE)


@each_trips
def test_a_register_outside_its_loop(trips: int) -> None:
    def kernel(data: Any, flag: Any) -> None:
        made: list[Any] = []
        loop(flag, trips, lambda _: made.append(nisa.register_alloc(1)))
        nl.fori_loop(0, made[-1], lambda _: None)

    refuses(kernel, OUTSIDE)


def test_a_register_of_another_trip() -> None:
    def kernel(data: Any, flag: Any) -> None:
        made: list[Any] = []

        def body(index: Any) -> None:
            made.append(index)
            nl.fori_loop(0, made[0], lambda _: None)

        loop(flag, THREE, body)

    refuses(kernel, OUTSIDE)


def test_a_register_that_passes_from_trip_to_trip() -> None:
    def kernel(data: Any, flag: Any) -> None:
        tile = sbuf((1, 1), nl.int32, 1)
        outer = nisa.register_alloc(0)
        loop(flag, ONE, lambda _: nisa.register_load(outer, tile))

    refuses(kernel, "A register from outside a loop body is loaded in it")


def test_a_register_of_another_core() -> None:
    made: list[Any] = []

    def kernel(data: Any, flag: Any) -> Any:
        made.append(nisa.register_alloc(1))
        nl.fori_loop(0, made[0], lambda _: None)
        return store(sbuf((8, 4)))

    refuses(kernel, "belongs to another core", num_cores=2)


# A loop's body is traced once: Python state cannot tell its trips apart.


def counted_body(use: Callable[[int], None]) -> Callable[[Any], None]:
    done: list[Any] = []

    def body(_: Any) -> None:
        use(len(done))
        done.append(None)

    return body


@each_trips
@pytest.mark.parametrize("chosen", ["rows", "columns", "constant", "engine", "register"])
def test_a_python_counter_in_a_body(trips: int, chosen: str) -> None:
    def kernel(data: Any, flag: Any) -> None:
        tile, registers = sbuf((128, 4)), [register(flag, place) for place in range(3)]
        engines = [nisa.engine.vector, nisa.engine.gpsimd]
        uses: dict[str, Callable[[int], None]] = {
            "rows": lambda done: nisa.dma_copy(
                dst=tile, src=data[:, done : done + 4], dge_mode=HWDGE
            ),
            "columns": lambda done: nisa.memset(dst=tile[:, done % 4 : done % 4 + 1], value=0.0),
            "constant": lambda done: nisa.memset(dst=tile, value=float(done)),
            "engine": lambda done: nisa.memset(dst=tile, value=0.0, engine=engines[done % 2]),
            "register": lambda done: nl.fori_loop(0, registers[done % 3], lambda _: None),
        }
        loop(flag, trips, counted_body(uses[chosen]))

    refuses(kernel, TRACED_ONCE)


def test_a_counter_that_a_second_trace_does_not_show() -> None:
    def kernel(data: Any, flag: Any) -> None:
        tile = sbuf((128, 4))
        body = counted_body(lambda done: nisa.memset(dst=tile, value=float(done > 2)))
        loop(flag, THREE, body)

    refuses(kernel, "Two trips of a loop issued different instructions")


@each_trips
def test_a_python_counter_used_after_the_loop(trips: int) -> None:
    def kernel(data: Any, flag: Any) -> Any:
        done: list[Any] = []
        loop(flag, trips, lambda _: done.append(None))
        return store(sbuf((8, 4), value=float(len(done))))

    refuses(kernel, "the device traces the body once")


def test_a_body_without_trips_is_compiled_too() -> None:
    refuses(
        lambda data, flag: loop(flag, NONE, lambda _: matmul(accumulate=None)),
        "say whether to accumulate",
    )
    too_wide = 49 * 1024
    refuses(lambda data, flag: loop(flag, NONE, lambda _: sbuf((1, too_wide))), "SBUF: ")


def test_a_negative_number_of_trips() -> None:
    refuses(lambda data, flag: nl.fori_loop(0, -1, lambda _: None), "from 0 to -1 has a negative")
    refuses(
        lambda data, flag: nl.fori_loop(2, register(flag, ONE), lambda _: None),
        "from 2 to 1 has a negative",
    )
    for step in (0, -1):
        refuses(
            lambda data, flag, step=step: nl.fori_loop(0, 2, lambda _: None, step),
            "step is a positive int",
        )


# The cores run one program.


def more(count: int, tile: Any) -> None:
    for _ in range(count):
        nisa.memset(dst=tile, value=0.0)


@pytest.mark.parametrize("is_looped", [False, True])
@pytest.mark.parametrize("chosen", ["engine", "constant", "columns", "dtype", "more"])
def test_cores_with_other_instructions(chosen: str, is_looped: bool) -> None:
    def kernel(data: Any, flag: Any) -> Any:
        core, tile = nl.program_id(axis=0), sbuf((128, 4))
        engine = [nisa.engine.vector, nisa.engine.gpsimd][core]
        uses: dict[str, Callable[[], None]] = {
            "engine": lambda: nisa.memset(dst=tile, value=0.0, engine=engine),
            "constant": lambda: nisa.memset(dst=tile, value=float(core)),
            "columns": lambda: nisa.memset(dst=tile[:, core : core + 1], value=0.0),
            "dtype": lambda: nisa.memset(dst=tile.view([nl.int32, nl.uint32][core]), value=0),
            "more": lambda: more(core, tile),
        }
        if is_looped:
            loop(flag, ONE, lambda _: uses[chosen]())
        else:
            uses[chosen]()
        out = nl.ndarray((2, 128, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[core], src=tile)
        return out

    refuses(kernel, CORES_DIFFER, num_cores=2)


def test_cores_may_read_and_write_hbm_in_places_of_their_own() -> None:
    def kernel(data: Any, flag: Any) -> Any:
        core, tile = nl.program_id(axis=0), sbuf((64, 256))
        source = data[64 * core : 64 * core + 64, :]
        loop(flag, ONE, lambda _: nisa.dma_copy(dst=tile, src=source, dge_mode=HWDGE))
        out = nl.ndarray((2, 64, 256), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[core], src=tile)
        return out

    output = run(kernel, num_cores=2)
    data = output.inputs["data"].data
    np.testing.assert_array_equal(output.output.reshape(128, 256), data)


# Inputs stay as they are, and views are what they say.


def test_inputs_are_not_written() -> None:
    def kernel(data: Any, flag: Any) -> Any:
        nisa.dma_copy(dst=data, src=sbuf((128, 256)))
        return store(sbuf((8, 4)))

    refuses(kernel, "data is an input of the kernel, which must not be written")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (slice(256, 256), "slice from 256 to 256 of a dimension of 256"),
        (slice(256, 300), "slice from 256 to 300"),
        (slice(-300, 4), "slice from -300 to 4"),
        (slice(0, -257), "slice from 0 to -257"),
        (slice(4, 0, -1), "slice from 4 to 0"),
        (slice(4, 4), "empty slice, from 4 to 4"),
        (slice(6, 4), "empty slice, from 6 to 4"),
        (slice(-2, -4), "empty slice, from -2 to -4"),
        (slice(0, 0), "empty slice, from 0 to 0"),
        (..., "no index of the emulated subset"),
        (None, "no index of the emulated subset"),
        (True, "no index of the emulated subset"),
        ([0, 2], "no index of the emulated subset"),
    ],
)
def test_slices(index: Any, message: str) -> None:
    refuses(lambda data, flag: data[:, index], message)


def test_slices_within_bounds_are_those_of_numpy() -> None:
    def kernel(data: Any, flag: Any) -> Any:
        tile = sbuf((128, 256))
        nisa.dma_copy(dst=tile, src=data)
        return store(tile[4:-2:3, -6:])

    result = run(kernel)
    np.testing.assert_array_equal(result.output, result.inputs["data"].data[4:-2:3, -6:])


def test_more_indices_than_dimensions() -> None:
    refuses(lambda data, flag: data[0:1, 0:1, 0:1], "3 indices of 2 dimensions")


@pytest.mark.parametrize("pair", [[1, 0], [1, -3], [-1, 4]])
def test_patterns(pair: list[int]) -> None:
    refuses(
        lambda data, flag: data.ap(pattern=[[256, 128], pair], offset=8),
        "strides of 0 or more and counts of 1 or more",
    )


def test_empty_tensors() -> None:
    refuses(
        lambda data, flag: nl.ndarray((128, 0), dtype=nl.float32, buffer=nl.sbuf),
        "no dimension is empty",
    )
