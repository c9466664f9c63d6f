"""How the few-row products are cut into programs: numbers that a measurement chooses."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting

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


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a program finds its pairs, as a kernel's arguments.

    Attributes:
        num_groups: programs along the first axis of the grid.
    """

    num_groups: int
    tensors: dict[str, Tensor]
    numbers: dict[str, int]
    constants: dict[str, Any]


def lookup_of(routing: PairRouting, tiles: ProductTiles) -> Lookup:
    """Tiles if there are any; else one program per pair or per expert, whichever are fewer.

    Raises:
        ValueError: the routing's tiles have another height, or there are too many pairs to look
            up without any.
    """
    ids = routing.topk_ids.contiguous()
    plan = routing.tiles
    if plan is not None and plan.pairs.shape[1] != tiles.block_rows:
        raise ValueError(
            f"The routing has tiles of {plan.pairs.shape[1]} rows, the product asks for "
            f"{tiles.block_rows}: plan it with the product's block_rows."
        )
    if plan is None and routing.num_pairs > MAX_LOOKUP_PAIRS:
        raise ValueError(
            f"{routing.num_pairs} pairs are too many to look up in each program, at most "
            f"{MAX_LOOKUP_PAIRS}: plan tiles first."
        )
    is_by_expert = routing.num_local_experts < routing.num_pairs
    num_groups = routing.num_local_experts if is_by_expert else routing.num_pairs
    return Lookup(
        num_groups=num_groups if plan is None else plan.expert.shape[0],
        tensors={
            "ids_ptr": ids,
            "map_ptr": ids if routing.expert_map is None else routing.expert_map,
            "tile_expert_ptr": ids if plan is None else plan.expert,
            "tile_pairs_ptr": ids if plan is None else plan.pairs,
        },
        numbers={"num_pairs": routing.num_pairs, "num_ids": routing.num_ids},
        constants={
            "HAS_MAP": routing.expert_map is not None,
            "HAS_TILES": plan is not None,
            "IS_BY_EXPERT": is_by_expert,
            "BLOCK_PAIRS": triton.next_power_of_2(routing.num_pairs) if plan is None else 1,
        },
    )


def weight_operand(weight: Tensor, tiles: ProductTiles) -> Any:
    """The weight [num_local_experts, n, k] as a kernel takes it: a pointer or a descriptor."""
    if not tiles.has_descriptors:
        return weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    matrix = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(matrix, [tiles.block_columns, GROUP])
