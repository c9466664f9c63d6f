"""How a program of the few-row products finds its pairs and its weights, as arguments."""

from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from vllm_moe_ep_kernels.product_tiles import GROUP, MAX_LOOKUP_PAIRS, ProductTiles
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting


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
    block_pairs = triton.next_power_of_2(routing.num_pairs)
    # By the block, not by the pairs: sizes with one block share their compiled kernel.
    is_by_expert = routing.num_local_experts < block_pairs
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
            "IS_BY_EXPERT": is_by_expert and plan is None,
            "BLOCK_PAIRS": block_pairs if plan is None else 1,
        },
    )


def weight_operand(weight: Tensor, tiles: ProductTiles) -> Any:
    """The weight [num_local_experts, n, k] as a kernel takes it: a pointer or a descriptor."""
    if not tiles.has_descriptors:
        return weight
    from triton.tools.tensor_descriptor import TensorDescriptor

    matrix = weight.view(-1, weight.shape[2])
    return TensorDescriptor.from_tensor(matrix, [tiles.block_columns, GROUP])
