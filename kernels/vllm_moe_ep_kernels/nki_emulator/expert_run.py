"""One expert of a given size through the fused kernels, for counts: numbers do not matter."""

from dataclasses import dataclass

import numpy as np

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki.experts import gated_experts, grouped_experts
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight
from vllm_moe_ep_kernels.nki_emulator.simulate import Run, simulate

WEIGHTS = ("w13_codes", "w13_scales", "w2_codes", "w2_scales")
_CODES = ("w13_codes", "w2_codes")


@dataclass(frozen=True)
class Expert:
    """One prepared expert."""

    w13: PreparedWeight
    w2: PreparedWeight

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes

    def run(self, num_rows: int, flag: int, num_cores: int = 2, has_own_rows: bool = False) -> Run:
        """``gated_experts`` on rows of ones, or ``grouped_experts``."""
        lead = (1,) if has_own_rows else ()
        arguments = {
            "x": np.ones((*lead, num_rows, self.w13.k), np.float32),
            "w13_codes": self.w13.codes,
            "w13_scales": self.w13.scales,
            "w2_codes": self.w2.codes,
            "w2_scales": self.w2.scales,
            "row_weight": np.ones((1, num_rows), np.float32),
            "flags": np.array([[flag]], np.int32),
            "is_fp4": self.w13.is_fp4,
            "swiglu_limit": 0.0,
        }
        return simulate(grouped_experts if has_own_rows else gated_experts, num_cores, arguments)


def broken_bars(expert: Expert, run: Run) -> list[str]:
    """What a run that visits the expert breaks: bytes read once, and transfers large enough."""
    found = []
    num_bytes = run.bytes_read(*WEIGHTS)
    if not expert.num_bytes <= num_bytes < 1.02 * expert.num_bytes:
        found.append(f"{num_bytes} weight bytes read of {expert.num_bytes}")
    for name in _CODES:
        if not run.bytes_read(name) == run.bytes_covered(name) == run.inputs[name].data.nbytes:
            found.append(f"a byte of {name} is read twice, or never")
    sizes = [
        min(move.bytes_per_partition, move.chunk_bytes)
        for counts in run.counts
        for move in counts.transfers
        if move.tensor in _CODES
    ]
    least = min(sizes, default=0)
    if least < trainium2.MIN_DMA_BYTES_PER_PARTITION:
        found.append(f"{least} bytes per partition and transfer")
    return found
