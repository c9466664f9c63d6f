"""What one expert of DeepSeek-V3's size costs on Trainium2, by the emulator's counts."""

from dataclasses import dataclass

import numpy as np
import pytest

from vllm_moe_ep_kernels.nki.experts import gated_experts
from vllm_moe_ep_kernels.nki.launch import has_simulator
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_emulator import trainium2
from vllm_moe_ep_kernels.nki_emulator.simulate import Run, simulate

HIDDEN, WIDTH = 7168, 2048
WEIGHTS = ("w13_codes", "w13_scales", "w2_codes", "w2_scales")
pytestmark = pytest.mark.skipif(has_simulator(), reason="counts are the emulator's")


@dataclass(frozen=True)
class Expert:
    w13: PreparedWeight
    w2: PreparedWeight

    def run(self, num_rows: int, flag: int) -> Run:
        arguments = {
            "x": np.ones((num_rows, HIDDEN), np.float32),
            "w13_codes": self.w13.codes,
            "w13_scales": self.w13.scales,
            "w2_codes": self.w2.codes,
            "w2_scales": self.w2.scales,
            "row_weight": np.ones((1, num_rows), np.float32),
            "flags": np.array([[flag]], np.int32),
            "is_fp4": self.w13.is_fp4,
            "swiglu_limit": 0.0,
        }
        return simulate(gated_experts, 2, arguments)


@pytest.fixture(scope="module")
def expert() -> Expert:
    rng = np.random.default_rng()

    def matrix(n: int, k: int, k_parts: int) -> PreparedWeight:
        values = rng.integers(0, 0x78, (1, n, k), dtype=np.uint8)
        scale = np.full((1, n // 128, k // 128), 1e-5, np.float32)
        return prepare(values, scale, (128, 128), False, 2, k_parts, is_interleaved=k_parts == 1)

    return Expert(matrix(2 * WIDTH, HIDDEN, 1), matrix(HIDDEN, WIDTH, 2))


@pytest.mark.parametrize("num_rows", [1, 8, 16])
def test_a_hit_expert(expert: Expert, num_rows: int) -> None:
    run = expert.run(num_rows, 1)
    num_bytes = expert.w13.num_bytes + expert.w2.num_bytes
    assert num_bytes <= run.bytes_read(*WEIGHTS) < 1.02 * num_bytes
    for codes, weight in (("w13_codes", expert.w13), ("w2_codes", expert.w2)):
        # As many bytes as there are, each of them at least once: none twice.
        assert run.bytes_read(codes) == run.bytes_covered(codes) == weight.codes.nbytes
    for counts in run.counts:
        assert counts.critical()[0] == "hbm"
        codes = [move for move in counts.transfers if move.tensor.endswith("codes")]
        least = trainium2.MIN_DMA_BYTES_PER_PARTITION
        assert min(move.bytes_per_partition for move in codes) >= least
        assert min(move.chunk_bytes for move in codes) >= least
    first, second = (counts.bytes_read() for counts in run.counts)
    assert first == second


def test_an_expert_that_is_not_hit(expert: Expert) -> None:
    run = expert.run(16, 0)
    assert run.bytes_read(*WEIGHTS) == 0
    assert run.counts[0].critical()[1] < 15
