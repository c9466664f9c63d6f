"""How the few-row products are cut into programs: numbers that a measurement chooses."""

from dataclasses import dataclass
from typing import Any

GROUP = 128
"""Columns with one activation scale; rows and columns with one weight scale."""
MAX_LOOKUP_PAIRS = 1024
"""Pairs among which each program may look up its own; with more, tiles are needed."""


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """One product's programs.

    Attributes:
        block_rows: pairs in a program, a power of two from 8.
        block_columns: weight rows in a program (of gate and of up each), a power of two that
            divides 128.
        num_warps: of a program.
        num_stages: steps of 128 columns whose loads are under way together, and one more.
        has_descriptors: weights come through the tensor memory accelerator instead of by
            asynchronous copies of 16 bytes.
        is_overlapped: programs start while the kernel before them ends (programmatic dependent
            launch, SM90).
        prefetch_bytes: of each weight row, fetched to L2 before the wait for the kernel before;
            a multiple of 16, 0 for none. Only where `is_overlapped`.
    """

    block_rows: int = 16
    block_columns: int = 64
    num_warps: int = 4
    num_stages: int = 4
    has_descriptors: bool = False
    is_overlapped: bool = False
    prefetch_bytes: int = 0

    @property
    def launch_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        # Named only where it is used: interpreted kernels take no such option.
        return {**options, "launch_pdl": True} if self.is_overlapped else options
