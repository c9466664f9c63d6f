"""What a block-quantised format keeps of numbers."""

from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import dequantise
from vllm_moe_ep_kernels.reference.quantise import quantise


def quantise_dequantise(
    values: Tensor,
    block_size: tuple[int, int],
    max_value: float,
    is_power_of_two: bool,
    is_fp4: bool,
) -> Tensor:
    """``quantise`` and ``dequantise`` in one.

    Args:
        values: [..., n, k], any float dtype; k even for FP4.
        block_size, max_value, is_power_of_two, is_fp4: as for ``quantise``.

    Returns:
        fp32 [..., n, k].
    """
    stored = quantise(values, block_size, max_value, is_power_of_two, is_fp4)
    return dequantise(*stored, block_size)
