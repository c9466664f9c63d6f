"""Trainium2's public figures, each pinned, and the times that follow from them."""

import numpy as np
import pytest
from small_kernels import matmul, sbuf, store

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki_emulator import isa as nisa
from vllm_moe_ep_kernels.nki_emulator.simulate import simulate

FIGURES = {
    "NUM_PARTITIONS": 128,
    "SBUF_BYTES_PER_PARTITION": 196_608,
    "PSUM_BANK_BYTES": 2_048,
    "NUM_PSUM_BANKS": 8,
    "MAX_STATIONARY": 128,
    "MAX_MOVING": 512,
    "MIN_DMA_BYTES_PER_PARTITION": 2_048,
    "CORES_PER_CHIP": 8,
    "HBM_BYTES_PER_US": 362_500.0,
    "DMA_BYTES_PER_US": 368_000.0,
    "CYCLES_PER_US": {"tensor": 2400.0, "vector": 960.0, "scalar": 1200.0, "gpsimd": 1200.0},
    "MIN_CYCLES": 64,
    "FP32_MATMUL_PASSES": 4,
    "FP32_TRANSPOSE_PASSES": 2,
    "ELEMENTS_PER_CYCLE": 1,
}


def test_every_figure_is_the_published_one() -> None:
    """The sources are named where the figures are; a change needs a better source."""
    found = {name: value for name, value in vars(trainium2).items() if name.isupper()}
    assert found == FIGURES


def test_times_of_one_instruction_each() -> None:
    """960 elements a partition, and 512 columns of a matmul."""

    def kernel(data: object) -> object:
        wide = sbuf((128, 960))
        nisa.tensor_scalar(dst=wide, data=wide, op0="add", operand0=1.0)
        nisa.activation(dst=wide, op="copy", data=wide)
        matmul()
        return store(wide[:, 0:4])

    counts = simulate(kernel, 1, {"data": np.zeros((1, 1), np.float32)}).counts[0]
    bounds = counts.bounds_us()
    # memset of the tile and of two matmul operands of 128 and 64 columns, and the addition.
    assert bounds["vector"] == pytest.approx((960 + 128 + 64 + 960) / 960)
    assert bounds["scalar"] == pytest.approx(960 / 1200)
    assert bounds["tensor"] == pytest.approx(64 / 2400)
    assert bounds["gpsimd"] == 0
    assert bounds["hbm"] == pytest.approx(128 * 4 * 4 / 362_500)
