"""Time and memory of one call, on a GPU by replays of a CUDA graph, on CPU by the wall clock."""

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WARM_UPS = 3
Call = Callable[[], object]


def graph_us(call: Call, repeats: int, flush: Tensor) -> float:
    """Median of graph replays, microseconds. `flush` is overwritten before each: a cold L2."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(_WARM_UPS + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[_WARM_UPS:])


def wall_us(call: Call, repeats: int, flush: Tensor) -> float:
    """Median of eager calls, microseconds. `flush` is overwritten before each: cold caches."""
    times = []
    for _ in range(_WARM_UPS + repeats):
        flush.zero_()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times[_WARM_UPS:])


def cuda_workspace(call: Call) -> int:
    """Bytes that a call allocates at most, beyond what was held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held


def cpu_workspace(call: Call) -> int:
    """Bytes of the tensors that a call makes, at most at one time.

    What an operator allocates and frees inside itself is not seen.
    """
    with _LiveBytes() as live:
        call()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            # A view of an input is no new memory.
            if isinstance(leaf, Tensor) and _key(leaf) not in inputs | self._live.keys():
                self._add(leaf)
        self.peak = max(self.peak, sum(self._live.values()))
        return outputs

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = _key(tensor)
        self._live[key] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, key, None)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
