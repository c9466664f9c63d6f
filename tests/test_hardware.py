"""Platform detection: what is chosen and why, and refusals that say what to do."""

import sys
from pathlib import Path

import pytest

from vllm_moe_ep import hardware
from vllm_moe_ep.cuda_devices import CudaDevice
from vllm_moe_ep.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _fresh_probe() -> None:
    hardware.probe.cache_clear()


def test_cpu_is_chosen_when_no_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_neuron", lambda: False)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    found = hardware.probe()
    assert found.kind == "cpu"
    assert "no CUDA device" in found.reason
    assert "CPU host mode" in hardware.require_layer(found)


def _install(monkeypatch: pytest.MonkeyPatch, folder: Path, *packages: str) -> None:
    """Only these of Neuron's packages can be imported."""
    for name in ("torch_neuronx", "nki", "vllm_neuron"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in packages:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))


def test_neuron_is_found_by_package_and_device_and_comes_before_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(hardware.glob, "glob", lambda pattern: devices)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    _install(monkeypatch, tmp_path, "torch_neuronx", "nki", "vllm_neuron")
    assert hardware.probe().kind == "cpu", "the package alone"
    devices.append("/dev/neuron0")
    monkeypatch.setattr(hardware, "_has_cuda", lambda: True)
    hardware.probe.cache_clear()
    found = hardware.probe()
    assert found.kind == "neuron"
    assert hardware.require_layer(found) == "the static-shape EP layer (NKI kernels)"


@pytest.mark.parametrize("installed", [("nki",), ("vllm_neuron",)])
def test_neuron_without_what_the_layer_builds_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...]
) -> None:
    _install(monkeypatch, tmp_path, *installed)
    missing = {"nki", "vllm_neuron"} - set(installed)
    with pytest.raises(UnsupportedError, match=f"does not find {missing.pop()}: install") as error:
        hardware.require_layer(hardware.probe("neuron"))
    assert "another --moe-backend" in str(error.value)


def test_setting_overrides_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_neuron", lambda: True)
    found = hardware.probe("cpu")
    assert found.kind == "cpu"
    assert found.reason == "VLLM_MOE_EP_PLATFORM=cpu"


def test_cuda_asked_for_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    with pytest.raises(UnsupportedError, match="finds no CUDA device"):
        hardware.require_layer(hardware.probe("cuda"))


def test_probe_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(hardware, "_has_neuron", lambda: calls.append(1) or False)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    assert hardware.probe() is hardware.probe()
    assert len(calls) == 1


def _with_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    device = CudaDevice("the device", capability)
    monkeypatch.setattr(hardware, "_has_neuron", lambda: False)
    monkeypatch.setattr(hardware, "_cuda_devices", lambda: (device,))


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_hopper_and_blackwell_have_the_deepgemm_layer(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    _with_device(monkeypatch, capability)
    found = hardware.probe()
    assert (found.kind, found.capability) == ("cuda", capability)
    name = f"the DeepGEMM layer (SM{capability[0]}{capability[1]})"
    assert hardware.require_layer(found) == name


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_device(monkeypatch, (8, 0))
    with pytest.raises(UnsupportedError, match="the device of compute capability 8.0"):
        hardware.require_layer(hardware.probe())


def test_the_probe_does_not_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def initialise() -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    monkeypatch.setattr(hardware, "_has_neuron", lambda: False)
    monkeypatch.setattr(hardware, "visible_devices", lambda: (CudaDevice("H200", (9, 0)),))
    hardware._cuda_devices.cache_clear()
    assert hardware.probe().device_name == "H200"
    hardware._cuda_devices.cache_clear()
