"""A `vllm serve` process: started, waited for, and stopped with everything that it started."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_moe_ep.demo.cpu_binding import available_cpus, omp_threads_bind
from vllm_moe_ep.demo.server_log import last_words

HOST = "127.0.0.1"
# Without it vLLM kills its workers at once, and their shared memory stays in /dev/shm.
_ORDERLY_SHUTDOWN = ("--shutdown-timeout", "10")
_POLL_SECONDS = 0.25
_GRACE_SECONDS = 20.0
_KILL_SECONDS = 5.0


class ServerError(Exception):
    """The server did not start or did not stay; the text ends with its log's last words."""


def stock_flags(dtype: str) -> tuple[str, ...]:
    """What stock vLLM needs to serve DeepSeek in `dtype` on any CPU.

    With AMX it takes attention kernels that know bfloat16 only, and dies in float32; static-ep
    sees to that by itself.
    """
    return () if dtype == "bfloat16" else ("--attention-backend", "CPU_MLA")


def vllm_program() -> str:
    """The `vllm` of the running Python's environment.

    Raises:
        ServerError: vLLM is not installed there.
    """
    program = Path(sys.executable).with_name("vllm")
    if not program.exists():
        raise ServerError(
            f"vLLM is not installed beside {sys.executable}: there is no {program}. In a source "
            "tree, scripts/setup.sh installs it into .venv."
        )
    return str(program)


def cpu_environment(num_ranks: int) -> dict[str, str]:
    """Variables for a small offline CPU server; those set in this process's environment win."""
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": omp_threads_bind(num_ranks, available_cpus()),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """Context manager: on entry the server is ready for requests, on exit it is gone.

    Args:
        command: the program and its arguments; this class appends where to listen and how
            to shut down.
        log_path: file for the output; its folder is made, an older file is replaced.
        environment: variables on top of this process's own.
        startup_timeout_seconds: how long to wait for `/health`.

    Raises (on entry):
        ServerError: the process ended, or did not answer in time.
    """

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        environment: Mapping[str, str],
        startup_timeout_seconds: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://{HOST}:{self.port}"
        self.log_path = log_path
        self._command = [*command, "--host", HOST, "--port", str(self.port), *_ORDERLY_SHUTDOWN]
        self._environment = {**os.environ, **environment}
        self._startup_timeout_seconds = startup_timeout_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    @property
    def command_line(self) -> str:
        """The command as a shell would take it."""
        return shlex.join(self._command)

    def read_log(self) -> str:
        """All output so far, standard error included."""
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self._start()
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # vLLM leaves the sockets between its processes behind: in a folder that we remove.
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        with self.log_path.open("wb") as log:
            # A session of its own: one signal reaches all of the server's processes, and a
            # Ctrl-C in the terminal reaches only us, who then stop them in order.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, "VLLM_RPC_BASE_PATH": self._sockets.name},
                start_new_session=True,
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self._startup_timeout_seconds
        while not self._is_healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"The server was not ready after {self._startup_timeout_seconds:g} s. "
                    + self._evidence()
                )
            time.sleep(_POLL_SECONDS)

    def check_alive(self) -> None:
        """Raise ServerError if the server's process has ended."""
        code = None if self._process is None else self._process.poll()
        if code is not None:
            raise ServerError(f"The server ended with exit code {code}. {self._evidence()}")

    def _is_healthy(self) -> bool:
        # No proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.base_url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _evidence(self) -> str:
        return (
            f"It was started as:\n  {self.command_line}\n"
            f"Its log {self.log_path} says:\n{last_words(self.read_log())}"
        )

    def pause(self) -> None:
        """Hold all its processes: vLLM's idle workers poll, and would take a neighbour's CPU."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on; harmless if it runs."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        self.check_alive()
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End the server and every process that it started; harmless if there is none."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # A paused process would not hear the request to end.
            os.killpg(process.pid, signal.SIGCONT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(_GRACE_SECONDS)
        finally:
            _kill_group(process.pid)
            process.wait()
            if self._sockets is not None:
                self._sockets.cleanup()


def _kill_group(group: int) -> None:
    """Kill what is left of a process group and wait until it is gone.

    The wait has an end, since a container without an init process never reaps orphans.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)
