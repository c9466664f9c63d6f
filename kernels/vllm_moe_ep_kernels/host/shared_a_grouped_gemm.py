"""One matrix of rows times the matrices of several groups, on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_moe_ep_kernels.host.block_linear import block_linear
from vllm_moe_ep_kernels.host.dequantise import dequantise


def shared_a_grouped_gemm(
    a: tuple[Tensor, Tensor | None],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    group: Tensor,
    recipe_a: tuple[int, int],
    recipe_b: tuple[int, int],
) -> None:
    """d[i] = A @ B[group[i]].T for each i; zeros where group[i] is negative, and B is not read.

    One opaque op, so that a traced graph holds no branch on data.

    Args:
        a: float8_e4m3fn [m, k] with scales [ceil(m / n_a), ceil(k / k_a)]; or bf16, fp16 or fp32
            [m, k] with None. bf16 rows are multiplied in bf16 with fp32 sums, all others in fp32.
        b: float8_e4m3fn [num_groups, n, k], or uint8 [num_groups, n, k / 2] with two FP4 codes a
            byte, with scales [num_groups, ceil(n / n_b), ceil(k / k_b)].
        d: [num_products, m, n], any float dtype; overwritten.
        group: int32 [num_products], each below num_groups.
        recipe_a: (n_a, k_a), the blocks that share a scale; (1, k_a) is per row.
        recipe_b: (n_b, k_b).

    All scales are multipliers: fp32, float8_e8m0fnu or uint8 UE8M0.

    Raises:
        ValueError: shapes do not fit each other; says what was wanted and found.
    """
    m, k = a[0].shape
    num_groups, n = b[0].shape[:2]
    packed_k = k // 2 if b[0].dtype is torch.uint8 else k
    _check_shape("d", d, (group.shape[0], m, n))
    _check_shape("b", b[0], (num_groups, n, packed_k))
    _check_shape("b's scale", b[1], (num_groups, *_num_blocks(n, k, recipe_b)))
    if a[1] is not None:
        _check_shape("a's scale", a[1], _num_blocks(m, k, recipe_a))
    _run(a[0], a[1], b[0], b[1], d, group, recipe_a, recipe_b)


@torch.library.custom_op("vllm_moe_ep_kernels::shared_a_grouped_gemm", mutates_args=("d",))
def _run(
    a: Tensor,
    a_scale: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    d: Tensor,
    group: Tensor,
    recipe_a: Sequence[int],
    recipe_b: Sequence[int],
) -> None:
    rows = a.to(torch.float32) if a.dtype is torch.float16 else a
    if a_scale is not None:
        rows = dequantise(a, a_scale, (recipe_a[0], recipe_a[1]))
    for product, index in zip(d, group.tolist(), strict=True):
        if index < 0:
            product.zero_()
        else:
            product.copy_(block_linear(rows, b[index], b_scale[index], recipe_b))


@_run.register_fake
def _writes_d_alone(*arguments: object) -> None:
    pass


def _num_blocks(n: int, k: int, recipe: tuple[int, int]) -> tuple[int, int]:
    return -(-n // recipe[0]), -(-k // recipe[1])


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, found {list(tensor.shape)}.")
