"""Rows times one matrix, whatever format the matrix is in."""

from torch import Tensor

from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep_kernels.host.block_linear import block_linear, gated_block_linear
from vllm_moe_ep_kernels.host.linear import gated_linear, linear

Matrix = Tensor | Quantised


def product(rows: Tensor, matrix: Matrix, flag: Tensor | None = None) -> Tensor:
    """rows @ matrix.T: [rows, k] times [n, k] -> [rows, n], bf16 or fp32.

    Args:
        rows: in the dtype of a float matrix (fp32 for fp16), bf16 or fp32 for a quantised one.
        matrix: float or quantised.
        flag: int32 [1, 1] or None. Where it is 0 the matrix is not read: the result is zeros.
    """
    if isinstance(matrix, Tensor):
        return linear(rows, matrix) if flag is None else gated_linear(rows, matrix, flag)
    return block_product(rows, matrix.values, matrix.scale, matrix.block_size, flag)


def block_product(
    rows: Tensor,
    values: Tensor,
    scale: Tensor,
    block_size: tuple[int, int],
    flag: Tensor | None = None,
) -> Tensor:
    """``product`` with the parts of a quantised matrix, unchecked: for one of many in a tensor."""
    if flag is None:
        return block_linear(rows, values, scale, block_size)
    return gated_block_linear(rows, values, scale, block_size, flag)
