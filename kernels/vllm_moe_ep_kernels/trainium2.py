"""Public figures of Trainium2 (NeuronCore-v3), per physical core.

Sources, in the AWS Neuron documentation (SDK 2.29 to 2.32, awsdocs-neuron.readthedocs-hosted.com):

1. "Trainium2 Architecture Guide for NKI", nki/guides/architecture/trainium2_arch
2. "Trainium2 Architecture", about-neuron/arch/neuron-hardware/trainium2
3. "Trainium/Inferentia2 Architecture Guide for NKI", nki/guides/architecture
4. nki.isa.nc_matmul
5. "NKI DMA Bandwidth Guide", nki/guides/nki-dma-bandwidth-guide
6. "nki.api.shared": instruction costs of the elementwise engines
"""

from collections.abc import Mapping

NUM_PARTITIONS = 128  # 1
# 1 says 28 MiB a core, 224 KiB a partition. The compiler keeps a part, of undocumented size.
SBUF_BYTES_PER_PARTITION = 192 * 1024
PSUM_BANK_BYTES = 2048  # 3: 16 KiB a partition in 8 banks
NUM_PSUM_BANKS = 8
MAX_STATIONARY = 128  # 4
MAX_MOVING = 512  # 4
MIN_DMA_BYTES_PER_PARTITION = 2048  # 5: the least for good bandwidth

CORES_PER_CHIP = 8  # 1
# 1 says 2.9 TB/s in its later editions and 3 in its earlier ones, for the chip.
HBM_BYTES_PER_US = 2.9e6 / CORES_PER_CHIP
DMA_BYTES_PER_US = 16 * 23e3  # 5: 16 engines of 23 B/ns
CYCLES_PER_US = {"tensor": 2400.0, "vector": 960.0, "scalar": 1200.0, "gpsimd": 1200.0}  # 1, 3
# 3 and 6: an instruction takes at least this many cycles. The matmul figure is that of core v2.
MIN_CYCLES = 64
FP32_MATMUL_PASSES = 4  # 3
FP32_TRANSPOSE_PASSES = 2  # 1: twice as fast as without transpose mode
# Elements a cycle and partition on the elementwise engines. 1 gives the vector engine of this
# generation twice that for formats other than bf16, and four times that for bf16: not counted on.
ELEMENTS_PER_CYCLE = 1


def bounds_us(hbm_bytes: int, cycles: Mapping[str, float]) -> dict[str, float]:
    """Least time of each resource of one core, in microseconds."""
    bounds = {"hbm": hbm_bytes / HBM_BYTES_PER_US, "dma": hbm_bytes / DMA_BYTES_PER_US}
    for engine, rate in CYCLES_PER_US.items():
        bounds[engine] = cycles[engine] / rate
    return bounds
