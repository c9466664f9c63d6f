"""One block per pass, in parts that do not overlap, and never more than stock's buffers."""

import pytest
import torch
from fake_psum_kernels import fake_psum_bundle

from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.deepgemm.workspace import (
    block_bytes,
    columns_in,
    passes,
    rows_in,
    split_block,
)

CPU = torch.device("cpu")


def test_parts_are_aligned_and_apart() -> None:
    parts = split_block((1000, 0, 513), CPU)
    assert [part.numel() for part in parts] == [1000, 0, 513]
    starts = [part.storage_offset() for part in parts]
    assert starts == [0, 1024, 1024]
    assert parts[0].untyped_storage().nbytes() == block_bytes((1000, 0, 513)) == 1024 + 768
    rows = rows_in(parts[0], 5, 100, torch.bfloat16)
    rows.fill_(1)
    parts[2].fill_(7)
    assert bool((rows == 1).all())
    columns = columns_in(parts[2], 6, 4, 8)
    assert columns.stride() == (1, 8) and columns.dtype == torch.float32
    assert columns.data_ptr() == parts[2].data_ptr()


@pytest.mark.parametrize(
    ("num_rows", "max_rows", "sizes"),
    [(1, 8, [1]), (8, 8, [8]), (9, 8, [5, 4]), (17, 8, [6, 6, 5]), (24, 8, [8, 8, 8])],
)
def test_passes(num_rows: int, max_rows: int, sizes: list[int]) -> None:
    found = list(passes(num_rows, max_rows))
    assert [part.stop - part.start for part in found] == sizes
    assert [row for part in found for row in range(num_rows)[part]] == list(range(num_rows))


def fp8(*shape: int) -> ScaledWeight:
    scale = torch.empty(shape[0], shape[1] // 128, shape[2] // 128, device="meta")
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return ScaledWeight(values, scale, "float32", 128)


def stock_bytes(num_tokens: int) -> int:
    """vLLM 0.33's DeepGEMM experts on 32 experts, top-8, 7168 x 2048, at `num_tokens` rows.

    Two buffers of its workspace, and what one call allocates beside them: the cast input with
    its scales, those scales once more in the experts' order, the second scales.
    """
    num_rows = -(-(num_tokens * 8 + min(num_tokens * 8, 32) * 127) // 128) * 128
    workspace = num_rows * 7168 + num_rows * 7168 * 2
    scales = num_tokens * 56 * 4 + num_rows * 56 * 4 + num_rows * 16 * 4
    return workspace + num_tokens * 7168 + scales


@pytest.mark.parametrize("num_tokens", [1, 16, 512, 8192, 8193, 32768])
@pytest.mark.parametrize("alignment", [64, 128])
def test_no_more_memory_than_stock(num_tokens: int, alignment: int) -> None:
    weights = HopperWeights(fp8(32, 4096, 7168), fp8(32, 7168, 2048))
    kernels = load_row_kernels("reference")
    experts = HopperExperts(fake_psum_bundle()[0], weights, kernels, max_pass_rows=8192)
    used = experts.workspace_bytes(num_tokens, 8, alignment)
    assert used <= stock_bytes(num_tokens)
    if num_tokens > 8192:
        assert used <= experts.workspace_bytes(8192, 8, alignment) < 1.6e9
