"""Loading: the order of the checks, and what the library sees at its import."""

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from fake_library import ALL_NAMES, write_library
from toolkits import make_toolkit

from vllm_moe_ep.deepgemm.loading import DeepGemm, check_before_start, load, visible_capabilities
from vllm_moe_ep.deepgemm.support import Feature
from vllm_moe_ep.deepgemm.symbols import SET_ALIGNMENT, needed_symbols
from vllm_moe_ep.deepgemm.unavailable import DeepGemmUnavailableError

HOPPER, BLACKWELL = ((9, 0),), ((10, 0),)


@pytest.fixture(autouse=True)
def site(toolkit_and_site: Path) -> Path:
    return toolkit_and_site


def _load(feature: Feature = "bf16", capabilities: tuple = HOPPER) -> DeepGemm:
    return load(feature, capabilities, os.environ)


def test_library_finds_a_clean_cuda_home_and_its_cache(site: Path, tmp_path: Path) -> None:
    write_library(site)
    loaded = _load()
    seen = sys.modules["deep_gemm"].ENVIRON
    assert seen["CUDA_HOME"] == str(tmp_path / "cuda") == str(loaded.toolkit.root)
    assert seen["DG_JIT_CACHE_DIR"] == str(tmp_path / "cache" / "deep_gemm")
    assert os.path.isdir(seen["DG_JIT_CACHE_DIR"])
    assert loaded.description == "deep_gemm 2.8.1" and loaded.capability == (9, 0)


@pytest.mark.parametrize(("answer", "alignment"), [("128", 128), ("[240, 240]", 240)])
def test_alignment_is_the_librarys(site: Path, answer: str, alignment: int) -> None:
    write_library(site, alignment=answer)
    assert _load().alignment == alignment


@pytest.mark.parametrize("feature", ["bf16", "fp8_block", "fp4", "mega"])
def test_each_feature_finds_its_functions(site: Path, feature: Feature) -> None:
    write_library(site)
    loaded = _load(feature, BLACKWELL)
    assert list(loaded.functions) == [names[0] for names in needed_symbols(feature, 10)]
    for name, function in loaded.functions.items():
        assert "alignment" in name or function() == name


def test_all_missing_functions_are_named_together(site: Path) -> None:
    lost = {"m_grouped_bf16_gemm_nn_contiguous", "m_grouped_bf16_gemm_nt_masked"}
    write_library(site, names=[name for name in ALL_NAMES if name not in lost])
    with pytest.raises(ImportError) as caught:
        _load()
    message = str(caught.value)
    assert "deep_gemm 2.8.1 lacks: m_grouped_bf16_gemm_nn_contiguous, m_grouped_bf16" in message
    assert lost <= set(message.replace(",", "").replace(".", "").split())
    assert "m_grouped_bf16_gemm_nt_contiguous" not in message


def test_other_spellings_serve_fp8_but_not_fp4(site: Path) -> None:
    names = [name for name in ALL_NAMES if "fp8_fp4" not in name]
    names += ["fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous"]
    names += ["m_grouped_fp8_gemm_nn_contiguous", "fp8_m_grouped_gemm_nt_masked"]
    write_library(site, names=names)
    functions = _load("fp8_block", BLACKWELL).functions
    assert functions["m_grouped_fp8_fp4_gemm_nt_masked"]() == "fp8_m_grouped_gemm_nt_masked"
    with pytest.raises(DeepGemmUnavailableError, match="fp4 on SM100 needs.*lacks: fp8_fp4_gemm"):
        _load("fp4", BLACKWELL)


def test_mega_on_hopper_names_the_package_that_has_it(site: Path) -> None:
    write_library(site, names=[name for name in ALL_NAMES if "sm90" not in name])
    with pytest.raises(DeepGemmUnavailableError, match="_sm90, mega_moe.*sgl-deep-gemm"):
        _load("mega")


def test_device_is_judged_before_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(DeepGemmUnavailableError, match="8.0, bf16: use --moe-backend triton"):
        _load("bf16", ((8, 0),))
    with pytest.raises(DeepGemmUnavailableError, match="no CUDA device"):
        _load("bf16", ())
    with pytest.raises(DeepGemmUnavailableError, match="9.0, fp4: use --moe-backend marlin"):
        _load("fp4")
    with pytest.raises(DeepGemmUnavailableError, match="CUDA_HOME='/nowhere'"):
        _load("bf16")


def test_toolkit_is_judged_before_the_library(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_library(site)
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "old", "12.8")))
    with pytest.raises(DeepGemmUnavailableError, match="needs nvcc 12.9 or newer, found 12.8"):
        _load("bf16", BLACKWELL)
    assert "deep_gemm" not in sys.modules
    assert _load("bf16", HOPPER).alignment == 128


def test_absent_and_broken_libraries_are_told_apart(site: Path) -> None:
    with pytest.raises(DeepGemmUnavailableError, match="none of deep_gemm, vllm.third.*install"):
        _load()
    write_library(site, failure="OSError('libcudart.so.13')")
    with pytest.raises(DeepGemmUnavailableError, match="OSError: libcudart.so.13; repair"):
        _load()


def test_warnings_are_logged(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_library(site)
    sys.modules["deep_gemm"] = __import__("deep_gemm")
    silent = make_toolkit(tmp_path / "silent", script="true")
    monkeypatch.setenv("CUDA_HOME", str(silent))
    with caplog.at_level(logging.WARNING):
        _load()
        _load("fp8_block")
    texts = [record.getMessage() for record in caplog.records]
    assert sum("persistence of its compiled kernels is off" in text for text in texts) == 1
    assert any(f"{silent} is unknown" in text for text in texts)


def test_no_visible_device_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert visible_capabilities() == ()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    assert visible_capabilities() == ((9, 0), (9, 1))


def test_an_optional_function_is_found_where_the_library_has_it(site: Path) -> None:
    write_library(site, names=[*ALL_NAMES, SET_ALIGNMENT])
    assert callable(_load().functions[SET_ALIGNMENT])
    assert SET_ALIGNMENT not in _load("mega").functions


def test_checks_before_the_start_import_nothing(site: Path, tmp_path: Path) -> None:
    with pytest.raises(DeepGemmUnavailableError, match="none of deep_gemm.*is installed"):
        check_before_start(HOPPER, os.environ)
    write_library(site, failure="RuntimeError('imported')")
    assert check_before_start(HOPPER, os.environ) == "deep_gemm"
    with pytest.raises(DeepGemmUnavailableError, match="no CUDA device"):
        check_before_start((), os.environ)
    with pytest.raises(DeepGemmUnavailableError, match="mixed devices"):
        check_before_start(((9, 0), (8, 0)), os.environ)
    old = make_toolkit(tmp_path / "old", "12.2")
    with pytest.raises(DeepGemmUnavailableError, match="needs nvcc 12.3 or newer, found 12.2"):
        check_before_start(HOPPER, {**os.environ, "CUDA_HOME": str(old)})
