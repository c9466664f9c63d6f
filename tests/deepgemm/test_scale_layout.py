"""The memory layout of scales, byte for byte against plain loops."""

import math

import numpy as np
import pytest
import torch
from numpy_formats import packed_storage, raw_storage

from vllm_moe_ep_kernels.reference.scale_layout import mn_major, pack_ue8m0


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 1), (4, 4), (5, 6), (37, 9), (0, 3)])
def test_packed_bytes_and_gaps(num_rows: int, num_groups: int) -> None:
    scale_bytes = torch.randint(0, 256, (num_rows, num_groups), dtype=torch.uint8)
    packed = pack_ue8m0(scale_bytes)
    assert packed.shape == (num_rows, math.ceil(num_groups / 4))
    if num_rows:
        assert np.array_equal(raw_storage(packed), packed_storage(scale_bytes.numpy()))


def test_packing_strided_input_and_a_batch() -> None:
    scale_bytes = torch.randint(0, 256, (3, 7, 10), dtype=torch.uint8)
    packed = pack_ue8m0(scale_bytes.transpose(1, 2).contiguous().transpose(1, 2))
    assert packed.shape == (3, 7, 3) and packed.stride() == (3 * 8, 1, 8)
    for matrix, expected in zip(packed, scale_bytes, strict=True):
        assert np.array_equal(raw_storage(matrix), packed_storage(expected.numpy()))


@pytest.mark.parametrize("num_rows", [1, 4, 6])
def test_mn_major_of_fp32(num_rows: int) -> None:
    scale = torch.randn(2, num_rows, 3)
    moved = mn_major(scale)
    aligned = math.ceil(num_rows / 4) * 4
    assert torch.equal(moved, scale)
    assert moved.stride() == (3 * aligned, 1, aligned)
    gaps = moved.as_strided((2, 3, aligned), (3 * aligned, aligned, 1))[..., num_rows:]
    assert torch.equal(gaps, torch.zeros(2, 3, aligned - num_rows))
