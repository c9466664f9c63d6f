"""Persistent gloo processes that run functions of test modules, with a watchdog."""

import importlib.util
import inspect
import io
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WATCHDOG_SECONDS = 20
_START_SECONDS = 120


@dataclass(frozen=True)
class Groups:
    """This process's groups in one layout of token_size x replica_size ranks."""

    token_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Worker:
    """What a function running in the pool gets as its first argument."""

    rank: int
    layouts: dict[tuple[int, int], Groups]


class ProcessPool:
    """``world_size`` processes; smaller layouts use the first of them."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.TemporaryDirectory()
        init_method = (Path(self._store.name) / "store").as_uri()
        self._processes = []
        self._connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, init_method), daemon=True
            )
            process.start()
            self._processes.append(process)
            self._connections.append(ours)
        self._is_broken = False
        self._collect(world_size, _START_SECONDS)

    def run(self, function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        """``function(worker, *args)`` on ranks 0 .. num_ranks - 1; their results by rank.

        The function must be at the top level of its module, which each process loads by path.

        Raises:
            AssertionError: a rank raised, or was not done after WATCHDOG_SECONDS.
        """
        assert not self._is_broken, "an earlier test left the pool with hanging processes"
        job = _dumps((inspect.getfile(function), function.__name__, args))
        for connection in self._connections[:num_ranks]:
            connection.send_bytes(job)
        return self._collect(num_ranks, WATCHDOG_SECONDS)

    def _collect(self, num_ranks: int, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        answers = {}
        for rank, connection in enumerate(self._connections[:num_ranks]):
            if connection.poll(max(0.0, deadline - time.monotonic())):
                try:
                    answers[rank] = _loads(connection.recv_bytes())
                except EOFError:
                    answers[rank] = ("the process died", None)
        missing = [rank for rank in range(num_ranks) if rank not in answers]
        errors = {rank: error for rank, (error, _) in answers.items() if error}
        # A rank that hangs or died is of no use to later tests; one that raised still is.
        self._is_broken = bool(missing) or not all(p.is_alive() for p in self._processes)
        assert not errors and not missing, f"hanging ranks {missing}; errors:\n" + "\n".join(
            f"rank {rank}: {error}" for rank, error in errors.items()
        )
        return [answers[rank][1] for rank in range(num_ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._store.cleanup()


def _serve(connection: Connection, rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    worker = Worker(rank, _make_layouts(rank, world_size))
    connection.send_bytes(_dumps((None, None)))
    while True:
        path, name, args = _loads(connection.recv_bytes())
        answer: tuple[str | None, Any]
        try:
            answer = (None, getattr(_load(path), name)(worker, *args))
        except Exception:  # whatever it is, the parent reports it
            answer = (traceback.format_exc(), None)
        connection.send_bytes(_dumps(answer))


def _dumps(value: Any) -> bytes:
    # pickle alone writes uint32 tensors that it cannot read.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _make_layouts(rank: int, world_size: int) -> dict[tuple[int, int], Groups]:
    """Every layout of up to world_size ranks. All ranks create all groups, in one order."""
    layouts = {}
    for token_size in range(1, world_size + 1):
        for replica_size in range(1, world_size // token_size + 1):
            num_ranks = token_size * replica_size
            token_groups = [range(r, num_ranks, replica_size) for r in range(replica_size)]
            replica_groups = [
                range(t * replica_size, (t + 1) * replica_size) for t in range(token_size)
            ]
            layouts[token_size, replica_size] = Groups(
                _own_group(rank, token_groups), _own_group(rank, replica_groups)
            )
    return layouts


def _own_group(rank: int, groups: list[range]) -> dist.ProcessGroup | None:
    own = None
    for members in groups:
        if len(members) > 1:
            group = dist.new_group(list(members))
            own = group if rank in members else own
    return own


def _load(path: str) -> Any:
    name = "pool_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
