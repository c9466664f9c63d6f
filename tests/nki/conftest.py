"""Paths of the helper modules in this folder; the target of NKI's own simulator."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def simulated_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this NKI's simulator takes another generation than the kernels are written for."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
