"""What a block-quantised format keeps of numbers, as one op of a graph."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.quantise_dequantise import (
    quantise_dequantise as reference_quantise_dequantise,
)

# Cast at a time: the cast's own arrays, a dozen times this size, stay in cache.
_PART_NUMBERS = 2**16


@torch.library.custom_op("vllm_moe_ep_kernels::quantise_dequantise", mutates_args=())
def quantise_dequantise(
    values: Tensor,
    block_size: Sequence[int],
    max_value: float,
    is_power_of_two: bool,
    is_fp4: bool,
) -> Tensor:
    """``quantise`` and ``dequantise`` in one; the arithmetic is the reference's own.

    Opaque: with symbolic sizes its blocks take a compiler many times longer than a whole layer.

    Args:
        values: [..., n, k], any float dtype; k even for FP4.
        block_size, max_value, is_power_of_two, is_fp4: as for the reference's ``quantise``.

    Returns:
        fp32 [..., n, k].
    """
    block_n, block_k = block_size
    kept = values.new_empty(values.shape, dtype=torch.float32)
    num_blocks = max(1, _PART_NUMBERS // max(1, values[..., :block_n, :].numel()))
    for start in range(0, values.shape[-2], num_blocks * block_n):
        part = slice(start, start + num_blocks * block_n)
        kept[..., part, :] = reference_quantise_dequantise(
            values[..., part, :], (block_n, block_k), max_value, is_power_of_two, is_fp4
        )
    return kept


@quantise_dequantise.register_fake
def _like_output(values: Tensor, *_: object) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)
