"""What lies outside the emulated subset, or has operands of the wrong kind, is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from small_kernels import matmul, psum, register, run, sbuf, store

from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator import language as nl
from vllm_moe_ep_kernels.nki_emulator.rules import NkiRuleError
from vllm_moe_ep_kernels.nki_emulator.simulate import simulate


def ints(*shape: int, dtype: Any = nl.int32) -> Any:
    return sbuf(shape, dtype, 0)


def on_psum(*shape: int) -> Any:
    tile = psum(shape)
    nisa.memset(dst=tile, value=0.0)
    return tile


def scalar(op0: str, operand0: Any, *more: Any, tile: Any = None) -> None:
    tile = ints(128, 4) if tile is None else tile
    nisa.tensor_scalar(tile, tile, op0, operand0, *more)


def select(dst: Any, src: Any, predicate: Any) -> None:
    nisa.tensor_copy_predicated(dst=dst, src=src, predicate=predicate)


def shuffle(dst: Any, src: Any, *mask: int) -> None:
    nisa.nc_stream_shuffle(dst=dst, src=src, shuffle_mask=list(mask) or [0] * 32)


def transpose(dst: Any, data: Any, engine: Any = nisa.engine.tensor) -> None:
    nisa.nc_transpose(dst=dst, data=data, engine=engine)


def reduce(dst: Any, op: str) -> None:
    nisa.tensor_reduce(dst=dst, op=op, data=sbuf((128, 4, 4)), axis=2)


def dynamic(data: Any, flag: Any, index: Any = None) -> Any:
    index = register(flag, 2) if index is None else index
    return data.ap(pattern=[[1, 1], [1, 256]], scalar_offset=index)


# Each gets the HBM tensors data [128, 256] fp32 and flag [1, 3] int32.
BROKEN: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("between HBM and SBUF", lambda d, f: nisa.dma_copy(dst=sbuf((8, 4)), src=sbuf((8, 4)))),
    ("between HBM and SBUF", lambda d, f: nisa.dma_copy(dst=d[0:64], src=d[64:128])),
    ("selected into int32", lambda d, f: select(ints(8, 4), sbuf((8, 4)), ints(8, 4))),
    (
        "both in PSUM",
        lambda d, f: select(
            sbuf((8, 4)), on_psum(8, 4), nl.ndarray((8, 4), dtype=nl.uint32, buffer=nl.psum)
        ),
    ),
    ("op1 and operand1 go together", lambda d, f: scalar(nl.bitwise_and, 1, nl.bitwise_or)),
    ("takes an integer", lambda d, f: scalar(nl.bitwise_and, 1.0)),
    ("tensor_reduce with multiply", lambda d, f: reduce(sbuf((128, 4)), nl.multiply)),
    (r"tensor_reduce of \(128, 4, 4\) to", lambda d, f: reduce(sbuf((128, 5)), nl.add)),
    (
        "activation with tanh",
        lambda d, f: nisa.activation(dst=sbuf((8, 4)), op="tanh", data=sbuf((8, 4))),
    ),
    ("shuffle keeps the dtype", lambda d, f: shuffle(ints(32, 4), sbuf((32, 4)))),
    ("nc_stream_shuffle of", lambda d, f: shuffle(sbuf((32, 8)), sbuf((32, 4)))),
    ("32 partitions of 32", lambda d, f: shuffle(sbuf((32, 4)), sbuf((32, 4)), *[32] * 32)),
    ("32 partitions of 32", lambda d, f: shuffle(sbuf((32, 4)), sbuf((32, 4)), 0)),
    (
        "scalar engine cannot run this",
        lambda d, f: nisa.memset(dst=sbuf((8, 4)), value=0.0, engine=nisa.engine.scalar),
    ),
    (
        "integers of different sizes",
        lambda d, f: nisa.tensor_scalar(ints(8, 4, dtype=nl.uint8), ints(8, 4), nl.bitwise_and, 1),
    ),
    ("divide is no arithmetic", lambda d, f: scalar("divide", 2.0, tile=sbuf((8, 4)))),
    ("no dtype of the emulated", lambda d, f: nl.ndarray((8, 4), dtype=np.dtype(np.int64))),
    ("no memory of the", lambda d, f: nl.ndarray((8, 4), dtype=nl.float32, buffer="private_hbm")),
    ("has one axis", lambda d, f: nl.program_id(axis=1)),
    ("has one axis", lambda d, f: nl.num_programs(axes=1)),
    (
        "tensor engine alone",
        lambda d, f: transpose(psum((4, 8)), sbuf((8, 4)), nisa.engine.vector),
    ),
    ("transposes SBUF to PSUM", lambda d, f: transpose(sbuf((4, 8)), sbuf((8, 4)))),
    (
        "holds one number",
        lambda d, f: nisa.register_load(nisa.register_alloc(), ints(1, 2)),
    ),
    ("at least two dimensions", lambda d, f: nl.ndarray((8,), dtype=nl.float32)),
    (r"view\(\) after a dynamic", lambda d, f: dynamic(d, f).view(nl.int32)),
    (r"broadcast\(\) of a dimension of size 4", lambda d, f: sbuf((8, 4)).broadcast(1, 8)),
    ("HBM tensors alone", lambda d, f: sbuf((8, 4)).ap(pattern=[[4, 8], [1, 4]])),
    ("dynamic address needs a", lambda d, f: dynamic(d, f, sbuf((1, 1)))),
    ("dynamic address needs a", lambda d, f: dynamic(d, f, ints(1, 2))),
    ("Index 128 of a dimension of 128", lambda d, f: d[128]),
    ("no such view without a copy", lambda d, f: d[:, 0:8].reshape((8, 128))),
    ("reads stationary from SBUF", lambda d, f: matmul(stationary=on_psum(128, 128))),
]


@pytest.mark.parametrize(("message", "kernel"), BROKEN, ids=[message for message, _ in BROKEN])
def test_refusal(message: str, kernel: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(NkiRuleError, match=message):
        run(lambda data, flag: kernel(data, flag))


def test_a_logical_core_has_one_or_two_cores() -> None:
    with pytest.raises(NkiRuleError, match="1 or 2 cores, not 3"):
        simulate(lambda: None, 3, {})


def test_cores_return_equal_shapes() -> None:
    def kernel(data: Any, flag: Any) -> Any:
        out = store(sbuf((8, 4)))
        return out[0 : 4 + nl.program_id(axis=0)]

    with pytest.raises(NkiRuleError, match="Outputs differ"):
        run(kernel, num_cores=2)


def test_cores_have_memory_of_their_own() -> None:
    made = []

    def kernel(data: Any, flag: Any) -> Any:
        made.append(sbuf((8, 4)))
        return store(made[0])

    with pytest.raises(NkiRuleError, match="another core's memory"):
        run(kernel, num_cores=2)
