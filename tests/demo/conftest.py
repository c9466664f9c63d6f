"""A fake server process, started in a mode."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_moe_ep.demo.server import VllmServer

FAKE_SERVER = Path(__file__).parent / "fake_server.py"

MakeServer = Callable[..., VllmServer]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(mode: str = "serve", timeout: float = 30.0) -> VllmServer:
        command = (sys.executable, str(FAKE_SERVER), mode)
        return VllmServer(command, tmp_path / "logs" / "fake.log", {}, timeout)

    return make
