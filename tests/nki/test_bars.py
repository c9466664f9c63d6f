"""What one expert of DeepSeek-V3's size costs on Trainium2, by the emulator's counts."""

import numpy as np
import pytest

from vllm_moe_ep_kernels.nki.launch import has_simulator
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_emulator.expert_run import WEIGHTS, Expert, broken_bars

HIDDEN, WIDTH = 7168, 2048
pytestmark = pytest.mark.skipif(has_simulator(), reason="counts are the emulator's")


@pytest.fixture(scope="module")
def expert() -> Expert:
    rng = np.random.default_rng()

    def matrix(n: int, k: int, k_parts: int) -> PreparedWeight:
        values = rng.integers(0, 0x78, (1, n, k), dtype=np.uint8)
        scale = np.full((1, n // 128, k // 128), 1e-5, np.float32)
        return prepare(values, scale, (128, 128), False, 2, k_parts, is_interleaved=k_parts == 1)

    return Expert(matrix(2 * WIDTH, HIDDEN, 1), matrix(HIDDEN, WIDTH, 2))


@pytest.mark.parametrize(("num_rows", "has_own_rows"), [(1, False), (16, False), (16, True)])
def test_a_hit_expert(expert: Expert, num_rows: int, has_own_rows: bool) -> None:
    run = expert.run(num_rows, 1, has_own_rows=has_own_rows)
    assert broken_bars(expert, run) == []
    assert all(counts.critical()[0] == "hbm" for counts in run.counts)
    first, second = (counts.bytes_read() for counts in run.counts)
    assert first == second


def test_an_expert_that_is_not_hit(expert: Expert) -> None:
    run = expert.run(16, 0)
    assert run.bytes_read(*WEIGHTS) == 0
    assert run.counts[0].critical()[1] < 15
    assert len(broken_bars(expert, run)) > 0
