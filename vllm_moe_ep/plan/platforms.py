"""Published figures of the devices that a plan can be made for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Platform:
    """One rank's share of a device.

    Attributes:
        memory_bytes: device memory.
        bytes_per_s: memory bandwidth.
        flops: dense bf16 operations per second.
        flat_collective_s, hierarchical_collective_s: duration of a small collective.
        collective_ranks: number of ranks at which these two were measured.
        device_size: ranks that share a device.
        has_nki_kernels: whether experts run on the NKI kernels.
    """

    memory_bytes: float
    bytes_per_s: float
    flops: float
    flat_collective_s: float
    hierarchical_collective_s: float
    collective_ranks: int
    device_size: int
    has_nki_kernels: bool


_TRN2_RANKS = 4
# Trainium2 with cores joined in pairs (LNC=2), four ranks to a device of 96 GiB, 2.9 TB/s and
# 667 bf16 TFLOPS (AWS); collectives of [1, 5120] fp32 as reported for 64 ranks.
PLATFORMS = {
    "trn2": Platform(
        memory_bytes=96 * 2**30 / _TRN2_RANKS,
        bytes_per_s=2.9e12 / _TRN2_RANKS,
        flops=667e12 / _TRN2_RANKS,
        flat_collective_s=3.37e-3,
        hierarchical_collective_s=2.01e-3,
        collective_ranks=64,
        device_size=_TRN2_RANKS,
        has_nki_kernels=True,
    )
}
