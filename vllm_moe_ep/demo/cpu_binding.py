"""Which CPUs each rank's OpenMP threads get, in the form of `VLLM_CPU_OMP_THREADS_BIND`."""

import os
from collections.abc import Iterable
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")


def available_cpus() -> list[int]:
    """CPUs that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def omp_threads_bind(num_ranks: int, cpus: Iterable[int]) -> str:
    """Split `cpus` over the ranks, for example "0,1|2,3"; ranks share CPUs if there are too few.

    With a core for every rank, each core lends only its first hardware thread: two OpenMP
    threads on one core slow each other down, and ranks must not share a core.

    Raises:
        ValueError: there is no rank or no CPU to bind.
    """
    threads = sorted(cpus)
    if num_ranks < 1 or not threads:
        raise ValueError(f"Cannot bind {num_ranks} ranks to the CPUs {threads}: need one of each.")
    cores = one_thread_per_core(threads)
    pool = cores if len(cores) >= num_ranks else threads
    share = len(pool) // num_ranks
    if share == 0:
        return "|".join(str(pool[rank % len(pool)]) for rank in range(num_ranks))
    parts = [pool[rank * share : (rank + 1) * share] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, part)) for part in parts)


def one_thread_per_core(cpus: Iterable[int], topology: Path = _TOPOLOGY) -> list[int]:
    """The lowest of `cpus` on each physical core; all of them where the system does not say."""
    lowest: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text().strip() if siblings.exists() else f"cpu {cpu}"
        lowest.setdefault(core, cpu)
    return list(lowest.values())
