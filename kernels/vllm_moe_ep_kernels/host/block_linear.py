"""Products of activation rows with one expert's block-quantised weight, on the CPU."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vllm_moe_ep_kernels.host.dequantise import dequantise
from vllm_moe_ep_kernels.host.linear import linear

# Dequantised at a time: a tile stays in cache until its product is done.
_TILE_NUMBERS = 2**18


@torch.library.custom_op("vllm_moe_ep_kernels::block_linear", mutates_args=())
def block_linear(rows: Tensor, values: Tensor, scale: Tensor, block_size: Sequence[int]) -> Tensor:
    """rows @ weight.T with the weight dequantised to the rows' dtype, a tile of rows at a time.

    One opaque op, so that a traced graph holds no tile.

    Args:
        rows: [rows, k] bf16 or fp32.
        values: [n, k] float8_e4m3fn, or uint8 [n, k / 2] with two FP4 codes a byte.
        scale: [ceil(n / block_n), ceil(k / block_k)] fp32, float8_e8m0fnu or uint8 UE8M0.
        block_size: (block_n, block_k).

    Returns:
        [rows, n] in the dtype of rows.
    """
    block_n, block_k = block_size
    tiles = _tiles(values, scale, (block_n, block_k), rows.dtype, rows.shape[1])
    return torch.cat([linear(rows, tile) for tile in tiles], dim=1)


def _tiles(
    values: Tensor, scale: Tensor, block_size: tuple[int, int], dtype: torch.dtype, k: int
) -> Iterator[Tensor]:
    """The dequantised weight, whole block rows at a time."""
    block_n = block_size[0]
    num_blocks = max(1, _TILE_NUMBERS // (k * block_n))
    for start in range(0, scale.shape[0], num_blocks):
        stop = start + num_blocks
        rows = values[start * block_n : stop * block_n]
        yield dequantise(rows, scale[start:stop], block_size, dtype)


@torch.library.custom_op("vllm_moe_ep_kernels::gated_block_linear", mutates_args=())
def gated_block_linear(
    rows: Tensor, values: Tensor, scale: Tensor, block_size: Sequence[int], flag: Tensor
) -> Tensor:
    """``block_linear`` where the flag is 1; zeros without reading the weight where it is 0.

    One opaque op, so that a traced graph holds no branch on data.

    Args:
        flag: int32 [1, 1].
    """
    if flag.item() == 0:
        return rows.new_zeros((rows.shape[0], values.shape[0]))
    return block_linear(rows, values, scale, block_size)


@block_linear.register_fake
@gated_block_linear.register_fake
def _like_output(
    rows: Tensor,
    values: Tensor,
    scale: Tensor,
    block_size: Sequence[int],
    flag: Tensor | None = None,
) -> Tensor:
    return rows.new_empty((rows.shape[0], values.shape[0]))
