"""Platform detection: what is chosen and why, and refusals that say what to do."""

import pytest

from vllm_moe_ep import hardware
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


def test_neuron_comes_before_cuda_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_neuron", lambda: True)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: True)
    found = hardware.probe()
    assert found.kind == "neuron"
    with pytest.raises(UnsupportedError, match="another --moe-backend"):
        hardware.require_layer(found)


def test_setting_overrides_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_neuron", lambda: True)
    found = hardware.probe("cpu")
    assert found.kind == "cpu"
    assert found.reason == "VLLM_MOE_EP_PLATFORM=cpu"


def test_cuda_asked_for_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        hardware.require_layer(hardware.probe("cuda"))


def test_probe_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(hardware, "_has_neuron", lambda: calls.append(1) or False)
    monkeypatch.setattr(hardware, "_has_cuda", lambda: False)
    assert hardware.probe() is hardware.probe()
    assert len(calls) == 1
