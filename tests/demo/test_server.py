"""A server is waited for, explained when it fails, and gone afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_moe_ep.demo import server as server_module
from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.server import ServerError, VllmServer, cpu_environment, vllm_program

MakeServer = Callable[..., VllmServer]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


def test_ready_inside_and_gone_outside(make_server: MakeServer) -> None:
    with make_server() as server:
        assert server._process is not None
        pid = server._process.pid
        assert is_running(pid)
        assert CompletionClient(server.base_url).max_model_len() == 8
    wait_until_gone(pid)
    server.stop()  # a second time: harmless


def test_a_paused_server_waits_and_can_be_stopped(make_server: MakeServer) -> None:
    with make_server() as server:
        client = CompletionClient(server.base_url)
        server.pause()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.max_model_len)
            with pytest.raises(TimeoutError):
                answer.result(timeout=0.5)
            server.resume()
            assert answer.result(timeout=10) == 8
        server.pause()
        assert server._process is not None
        pid = server._process.pid
    wait_until_gone(pid)


def test_death_names_the_cause_the_command_and_the_log(make_server: MakeServer) -> None:
    server = make_server("die")
    with pytest.raises(ServerError) as error, server:
        pytest.fail("a dead server was called ready")
    text = str(error.value)
    assert "exit code 3" in text
    assert "ValueError: too few experts" in text
    assert "Engine core" not in text
    assert str(server.log_path) in text
    assert "fake_server.py die" in text


def test_time_out_says_so_and_stops_the_server(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = []
    kill_group = server_module._kill_group
    monkeypatch.setattr(
        server_module, "_kill_group", lambda group: (stopped.append(group), kill_group(group))
    )
    server = make_server("never-ready", timeout=1.0)
    with pytest.raises(ServerError, match="(?s)not ready after 1 s.*loading for ever"), server:
        pytest.fail("a silent server was called ready")
    assert len(stopped) == 1
    wait_until_gone(stopped[0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_children_are_killed_when_the_body_fails(
    make_server: MakeServer, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        with make_server("child") as server:
            child = int(server.read_log().split()[-1])
            assert is_running(child)
            raise error
    wait_until_gone(child)


def test_sigterm_stops_the_server(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys, time, pathlib\n"
        "from vllm_moe_ep.demo.interrupts import termination_as_interrupt\n"
        "from vllm_moe_ep.demo.server import VllmServer\n"
        "log = pathlib.Path(sys.argv[2])\n"
        "command = (sys.executable, sys.argv[1], 'child')\n"
        "with termination_as_interrupt(), VllmServer(command, log, {}) as server:\n"
        "    print(server.read_log().split()[-1], flush=True)\n"
        "    time.sleep(60)\n"
    )
    fake = Path(__file__).parent / "fake_server.py"
    command = [sys.executable, script, fake, tmp_path / "log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=_with_sources()) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert is_running(child)
        owner.send_signal(signal.SIGTERM)
        assert owner.wait(30) != 0
    wait_until_gone(child)


def _with_sources() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_users_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment = cpu_environment(2)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_missing_vllm_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ServerError, match="not installed.*scripts/setup.sh"):
        vllm_program()
