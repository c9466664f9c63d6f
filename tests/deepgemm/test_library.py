"""One outcome per process, under torch.compile too."""

import sys
from pathlib import Path

import pytest
import torch
from fake_library import write_library

from vllm_moe_ep.deepgemm import library
from vllm_moe_ep.deepgemm.library import deep_gemm

HOPPER = ((9, 0),)


@pytest.fixture(autouse=True)
def site(toolkit_and_site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_refusals", {})
    return toolkit_and_site


def test_one_outcome_per_process(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_library(site)
    monkeypatch.setattr(library, "visible_capabilities", lambda: HOPPER)
    first = deep_gemm("bf16")
    monkeypatch.setattr(library, "visible_capabilities", lambda: ())
    assert deep_gemm("bf16") is first
    texts = []
    for _ in range(2):
        with pytest.raises(ImportError) as caught:
            deep_gemm("fp8_block")
        texts.append(str(caught.value))
        monkeypatch.setattr(library, "visible_capabilities", lambda: HOPPER)
    assert texts[0] == texts[1] and "no CUDA device" in texts[0]


def test_first_call_inside_a_full_graph(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_library(site)
    init = site / "deep_gemm" / "__init__.py"
    name = "m_grouped_bf16_gemm_nt_contiguous"
    init.write_text(f"{init.read_text()}\ndef {name}(a, b, d, layout):\n    d.copy_(a @ b[0].T)\n")
    monkeypatch.setattr(library, "visible_capabilities", lambda: HOPPER)

    def step(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = torch.full((rows.shape[0], weight.shape[1]), torch.nan)
        loaded = deep_gemm("bf16")
        loaded.functions[name](rows, weight, out, None)
        return out * loaded.alignment

    rows, weight = torch.randn(5, 8), torch.randn(1, 3, 8)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert "deep_gemm" not in sys.modules
    assert torch.equal(compiled(rows, weight), (rows @ weight[0].T) * 128)
    assert torch.equal(compiled(rows, weight), step(rows, weight))
