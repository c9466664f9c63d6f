"""What a run cost: bytes, transfers, and cycles per engine of one core."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from vllm_moe_ep_kernels import trainium2


@dataclass(frozen=True, slots=True)
class Transfer:
    """One DMA instruction.

    Attributes:
        tensor: name of the tensor in HBM.
        is_read: from HBM to SBUF, else to HBM.
        num_bytes: moved in HBM; a broadcast source counts once per copy.
        bytes_per_partition: num_bytes over the partitions on the SBUF side.
        chunk_bytes: longest run that is contiguous on both sides, a descriptor's element.
    """

    tensor: str
    is_read: bool
    num_bytes: int
    bytes_per_partition: int
    chunk_bytes: int

    @property
    def num_descriptors(self) -> int:
        return -(-self.num_bytes // self.chunk_bytes)


@dataclass(slots=True)
class Counts:
    """One core's totals.

    Attributes:
        transfers: every DMA, in order.
        cycles: per engine. Row tiles of one matmul array count as running side by side.
        serial_tensor_cycles: the tensor engine's cycles if row tiles ran one after another.
        narrow_vector_cycles: the vector engine's cycles if it took one input element a cycle and
            partition, as the previous generation does.
        element_ops: per elementwise engine, elements written or reduced, all partitions.
        instructions: per engine.
        trips: trip count of each dynamic loop, in the order they were entered.
        peak_sbuf_bytes: most bytes per partition live at once.
        peak_psum_banks: most banks live at once.
    """

    transfers: list[Transfer] = field(default_factory=list)
    cycles: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    serial_tensor_cycles: float = 0.0
    narrow_vector_cycles: float = 0.0
    element_ops: Counter[str] = field(default_factory=Counter)
    instructions: Counter[str] = field(default_factory=Counter)
    trips: list[int] = field(default_factory=list)
    peak_sbuf_bytes: int = 0
    peak_psum_banks: int = 0

    def add(self, engine: str, cycles: float, elements: int = 0) -> None:
        self.cycles[engine] += cycles
        self.element_ops[engine] += elements
        self.instructions[engine] += 1

    def bytes_read(self, *tensors: str) -> int:
        """HBM bytes read, of the named tensors or of all."""
        return self._sum(True, tensors)

    def bytes_written(self, *tensors: str) -> int:
        return self._sum(False, tensors)

    def _sum(self, is_read: bool, tensors: tuple[str, ...]) -> int:
        return sum(
            transfer.num_bytes
            for transfer in self.transfers
            if transfer.is_read == is_read and (not tensors or transfer.tensor in tensors)
        )

    def bounds_us(self) -> dict[str, float]:
        """Least time of each resource in microseconds: nothing waits, nothing stalls."""
        return trainium2.bounds_us(self.bytes_read() + self.bytes_written(), self.cycles)

    def critical(self) -> tuple[str, float]:
        """The resource with the largest bound, and that bound in microseconds."""
        bounds = self.bounds_us()
        name = max(bounds, key=lambda resource: bounds[resource])
        return name, bounds[name]
