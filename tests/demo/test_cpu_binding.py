"""CPUs are split over ranks; hardware threads of one core are not."""

from pathlib import Path

import pytest

from vllm_moe_ep.demo import cpu_binding
from vllm_moe_ep.demo.cpu_binding import omp_threads_bind, one_thread_per_core


@pytest.fixture
def _every_cpu_is_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_binding, "one_thread_per_core", sorted)


@pytest.mark.usefixtures("_every_cpu_is_a_core")
@pytest.mark.parametrize(
    ("num_ranks", "cpus", "expected"),
    [
        (1, {0, 1}, "0,1"),
        (2, {0, 1}, "0|1"),
        (2, {7, 3, 4, 5, 6}, "3,4|5,6"),
        (4, {0, 1}, "0|1|0|1"),
        (3, {5}, "5|5|5"),
    ],
)
def test_split(num_ranks: int, cpus: set[int], expected: str) -> None:
    assert omp_threads_bind(num_ranks, cpus) == expected


def test_hyper_threads_are_left_idle_only_while_cores_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_binding, "one_thread_per_core", lambda cpus: [0, 1])
    assert omp_threads_bind(2, range(4)) == "0|1"
    assert omp_threads_bind(4, range(4)) == "0|1|2|3"


def test_one_thread_per_core_reads_the_topology(tmp_path: Path) -> None:
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert one_thread_per_core([3, 2, 1, 0], tmp_path) == [0, 1]
    assert one_thread_per_core([2, 3], tmp_path) == [2, 3]
    assert one_thread_per_core([8, 9], tmp_path) == [8, 9]


@pytest.mark.parametrize(("num_ranks", "cpus"), [(0, [1]), (2, [])])
def test_nothing_to_bind(num_ranks: int, cpus: list[int]) -> None:
    with pytest.raises(ValueError, match="Cannot bind"):
        omp_threads_bind(num_ranks, cpus)
