"""Pieces of the small kernels that break the emulator's rules."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator import language as nl
from vllm_moe_ep_kernels.nki_emulator.simulate import Run, simulate

HWDGE = nisa.dge_mode.hwdge
Kernel = Callable[..., Any]


def run(kernel: Kernel, num_cores: int = 1) -> Run:
    data = np.random.default_rng().standard_normal((128, 256)).astype(np.float32)
    flag = np.array([[1, 0, 3]], np.int32)
    return simulate(kernel, num_cores, {"data": data, "flag": flag})


def sbuf(shape: tuple[int, ...], dtype: Any = nl.float32, value: float | None = 0.0) -> Any:
    tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    if value is not None:
        nisa.memset(dst=tile, value=value)
    return tile


def psum(shape: tuple[int, ...]) -> Any:
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)


def store(tile: Any) -> Any:
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def register(flag: Any, index: int) -> Any:
    tile = nl.ndarray((1, 3), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=flag)
    trips = nisa.register_alloc()
    nisa.register_load(trips, tile[0:1, index : index + 1])
    return trips


def matmul(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"accumulate": False, **changes}
    arguments.setdefault("dst", psum((128, 64)))
    arguments.setdefault("stationary", sbuf((128, 128), nl.bfloat16))
    arguments.setdefault("moving", sbuf((128, 64), nl.bfloat16))
    nisa.nc_matmul(**arguments)
