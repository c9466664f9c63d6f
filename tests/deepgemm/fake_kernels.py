"""The library's grouped products as plain loops over the documented layouts, on CPU.

Rows that a kernel skips are left as they are, poisoned by whoever allocated them or by NaN here.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy_formats import raw_storage
from torch import Tensor

from vllm_moe_ep.deepgemm.loading import DeepGemm
from vllm_moe_ep.deepgemm.toolkit import Toolkit
from vllm_moe_ep.deepgemm.toolkit_version import ToolkitVersion

ALIGNMENT = 8
Scaled = tuple[Tensor, Tensor]


def fake_bundle(major: int) -> DeepGemm:
    toolkit = Toolkit(Path("/cuda"), "test", ToolkitVersion((13, 0), "test"))
    functions = {
        "m_grouped_bf16_gemm_nt_contiguous": _bf16_nt,
        "m_grouped_bf16_gemm_nn_contiguous": _bf16_nn,
        "m_grouped_fp8_fp4_gemm_nt_contiguous": _scaled_nt,
    }
    return DeepGemm("fake", (major, 0), toolkit, functions, ALIGNMENT)


def _shares(
    layout: Tensor, num_rows: int, num_experts: int, use_psum_layout: bool
) -> Iterator[tuple[int, slice]]:
    """(expert, rows) of each tile, as the kernel would walk them."""
    assert layout.dtype == torch.int32
    if use_psum_layout:
        assert layout.shape == (num_experts,)
        start = 0
        for expert, end in enumerate(layout.tolist()):
            assert start % ALIGNMENT == 0 and end <= num_rows
            yield expert, slice(start, end)
            start = end
        return
    assert layout.shape == (num_rows,)
    for start in range(0, num_rows, ALIGNMENT):
        tile = layout[start : start + ALIGNMENT].tolist()
        # A tile is computed for the expert of its first row; rows of two experts would be wrong.
        assert set(tile) <= {tile[0], -1}
        if tile[0] >= 0:
            yield tile[0], slice(start, min(start + ALIGNMENT, num_rows))


def _multiply(
    rows: Tensor, weight: Tensor, out: Tensor, layout: Tensor, use_psum_layout: bool
) -> None:
    out.fill_(torch.nan)
    for expert, share in _shares(layout, rows.shape[0], weight.shape[0], use_psum_layout):
        out[share] = (rows[share].float() @ weight[expert].float().T).to(out.dtype)


def _bf16_nt(
    a: Tensor, b: Tensor, d: Tensor, layout: Tensor, use_psum_layout: bool = False
) -> None:
    assert a.dtype == b.dtype == d.dtype == torch.bfloat16
    _multiply(a, b, d, layout, use_psum_layout)


def _bf16_nn(
    a: Tensor, b: Tensor, d: Tensor, layout: Tensor, use_psum_layout: bool = False
) -> None:
    _bf16_nt(a, b.transpose(1, 2), d, layout, use_psum_layout)


def _scaled_nt(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    layout: Tensor,
    recipe_a: tuple[int, int],
    recipe_b: tuple[int, int],
    disable_ue8m0_cast: bool,
    use_psum_layout: bool = False,
) -> None:
    assert disable_ue8m0_cast and d.dtype == torch.bfloat16
    rows = _dequantise(a[0].float(), a[1], recipe_a)
    values = b[0].float() if b[0].dtype == torch.float8_e4m3fn else _fp4_values(b[0])
    weight = torch.stack([_dequantise(v, s, recipe_b) for v, s in zip(values, b[1], strict=True)])
    _multiply(rows, weight, d, layout, use_psum_layout)


def _dequantise(values: Tensor, scale: Tensor, recipe: tuple[int, int]) -> Tensor:
    """fp32 [n, k] of values and a scale that is fp32 per block, or packed per row."""
    num_rows, width = values.shape
    if scale.dtype == torch.int32:
        assert recipe[0] == 1
        raw = raw_storage(scale)
        codes = raw.transpose(1, 0, 2).reshape(raw.shape[1], -1)[:num_rows]
        powers = np.exp2(codes.astype(np.float64) - 127)
        scale = torch.tensor(np.where(codes == 255, np.nan, powers), dtype=torch.float32)
    per_row = scale.repeat_interleave(recipe[0], 0)[:num_rows]
    return values * per_row.repeat_interleave(recipe[1], 1)[:, :width]


def _fp4_values(packed: Tensor) -> Tensor:
    """[..., n, k / 2] bytes -> fp32 [..., n, k], the low half of a byte first."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-value for value in magnitudes])
    codes = packed.view(torch.uint8).int()
    return torch.stack([table[codes % 16], table[codes // 16]], dim=-1).flatten(-2)
