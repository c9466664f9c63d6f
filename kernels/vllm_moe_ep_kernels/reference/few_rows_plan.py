"""Put the pairs of a step into tiles of one expert each, and cast the tokens' rows beside it."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.few_rows_routing import (
    PairRouting,
    RowTiles,
    local_ids,
    max_row_tiles,
)
from vllm_moe_ep_kernels.reference.quantise import quantise
from vllm_moe_ep_kernels.reference.scatter_rows import GROUP_SIZE, MAX_E4M3


def few_rows_plan(
    routing: PairRouting, block_rows: int, hidden_states: Tensor | None
) -> tuple[RowTiles, tuple[Tensor, Tensor] | None]:
    """Tiles in the order of their experts, empty ones last.

    Args:
        routing: its tiles are not read.
        block_rows: pairs in a tile.
        hidden_states: bf16 [num_tokens, width], width a multiple of 128, to be cast to fp8; or
            None.

    Returns:
        The tiles, as many as the pairs could need at most; and float8_e4m3fn [num_tokens, width]
        with fp32 scales [num_tokens, width / 128], or None.
    """
    local = local_ids(routing)
    num_tiles = max_row_tiles(routing.num_pairs, routing.num_local_experts, block_rows)
    expert_of_tile = torch.full((num_tiles,), -1, dtype=torch.int32, device=local.device)
    pairs = torch.full((num_tiles, block_rows), -1, dtype=torch.int32, device=local.device)
    tile = 0
    for expert in range(routing.num_local_experts):
        for part in (local == expert).nonzero().flatten().split(block_rows):
            if part.numel():
                expert_of_tile[tile] = expert
                pairs[tile, : part.numel()] = part.to(torch.int32)
                tile += 1
    cast = None
    if hidden_states is not None:
        cast = quantise(hidden_states, (1, GROUP_SIZE), MAX_E4M3, False, False)
    return RowTiles(expert_of_tile, pairs), cast
