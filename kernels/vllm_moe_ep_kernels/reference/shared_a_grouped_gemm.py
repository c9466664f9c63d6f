"""One matrix of rows times the matrices of several groups."""

import torch
from torch import Tensor

from vllm_moe_ep_kernels.reference.dequantise import dequantise


def shared_a_grouped_gemm(
    a: tuple[Tensor, Tensor | None],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    group: Tensor,
    recipe_a: tuple[int, int],
    recipe_b: tuple[int, int],
) -> None:
    """d[i] = A @ B[group[i]].T for each i; zeros, whatever B holds, where group[i] is negative.

    All groups read the same rows; the data of ``group`` picks the weights, the shapes do not
    depend on it. Sums are fp32, rounded once to the dtype of d.

    Args:
        a: float8_e4m3fn [m, k] with scales [ceil(m / n_a), ceil(k / k_a)]; or bf16, fp16 or fp32
            [m, k] with None.
        b: float8_e4m3fn [num_groups, n, k], or uint8 [num_groups, n, k / 2] with two FP4 codes a
            byte, with scales [num_groups, ceil(n / n_b), ceil(k / k_b)].
        d: [num_products, m, n], any float dtype; overwritten.
        group: int32 [num_products], each below num_groups.
        recipe_a: (n_a, k_a), the blocks that share a scale; (1, k_a) is per row.
        recipe_b: (n_b, k_b).

    All scales are multipliers: fp32, float8_e8m0fnu or uint8 UE8M0.
    """
    values, scale = a
    rows = values if scale is None else dequantise(values, scale, recipe_a)
    chosen = group.clamp(min=0).to(torch.int64)
    weights = dequantise(b[0][chosen], b[1][chosen], recipe_b)
    products = rows.to(torch.float32) @ weights.transpose(1, 2)
    d.copy_(torch.where(group[:, None, None] >= 0, products, 0.0))
