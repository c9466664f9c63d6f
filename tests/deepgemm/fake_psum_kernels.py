"""The library's grouped products on SM90 in their prefix-sum form, as plain loops on CPU.

As its scheduler does, an expert's rows start at the end of the one before, rounded up to the
height of a tile, and whole tiles are written.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vllm_moe_ep.deepgemm.loading import DeepGemm
from vllm_moe_ep.deepgemm.symbols import SET_ALIGNMENT
from vllm_moe_ep.deepgemm.toolkit import Toolkit
from vllm_moe_ep.deepgemm.toolkit_version import ToolkitVersion

DEFAULT_ALIGNMENT = 16


@dataclass
class LibraryState:
    """The process-wide tile height, and that of each product so far."""

    alignment: int = DEFAULT_ALIGNMENT
    used: list[int] = field(default_factory=list)


def fake_psum_bundle() -> tuple[DeepGemm, LibraryState]:
    state = LibraryState()

    def set_alignment(value: int) -> None:
        state.alignment = value

    def bf16(a: Tensor, b: Tensor, d: Tensor, ends: Tensor, use_psum_layout: bool) -> None:
        assert use_psum_layout and a.dtype == b.dtype == torch.bfloat16
        _multiply(state, a.float(), b.float(), d, ends)

    def fp8(
        a: tuple[Tensor, Tensor],
        b: tuple[Tensor, Tensor],
        d: Tensor,
        ends: Tensor,
        recipe_a: tuple[int, int],
        recipe_b: tuple[int, int],
        disable_ue8m0_cast: bool,
        use_psum_layout: bool,
    ) -> None:
        assert use_psum_layout and disable_ue8m0_cast
        assert (recipe_a, recipe_b) == ((1, 128), (128, 128))
        # What spares the library a transposition: columns one after the other, on 16 bytes.
        assert a[1].stride() == (1, -(-a[0].shape[0] // 4) * 4) and a[1].dtype == torch.float32
        assert b[1].is_contiguous()
        _multiply(state, _numbers(*a, recipe_a), _numbers(*b, recipe_b), d, ends)

    functions = {
        "m_grouped_bf16_gemm_nt_contiguous": bf16,
        "m_grouped_fp8_fp4_gemm_nt_contiguous": fp8,
        SET_ALIGNMENT: set_alignment,
    }
    toolkit = Toolkit(Path("/cuda"), "test", ToolkitVersion((13, 0), "test"))
    return DeepGemm("fake", (9, 0), toolkit, functions, DEFAULT_ALIGNMENT), state


def _numbers(values: Tensor, scale: Tensor, recipe: tuple[int, int]) -> Tensor:
    n, k = values.shape[-2:]
    per_row = scale.repeat_interleave(recipe[0], -2)[..., :n, :]
    return values.float() * per_row.repeat_interleave(recipe[1], -1)[..., :k]


def _multiply(state: LibraryState, a: Tensor, b: Tensor, d: Tensor, ends: Tensor) -> None:
    assert d.is_contiguous() and d.dtype == torch.bfloat16
    assert ends.dtype == torch.int32 and ends.shape == (b.shape[0],)
    assert a.shape[0] % state.alignment == 0
    state.used.append(state.alignment)
    tile, start = state.alignment, 0
    result = torch.full(d.shape, torch.nan)
    for expert, end in enumerate(ends.tolist()):
        assert end >= start
        last = -(-end // tile) * tile
        assert last <= d.shape[0], "a tile beyond the buffer"
        result[start:last] = a[start:last] @ b[expert].T
        start = last
    d.copy_(result.to(d.dtype))
