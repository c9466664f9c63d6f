"""Many processes, one build: nothing partial is seen and nothing stale blocks."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_moe_ep.deepgemm.build_lock import build_once, exclusive_lock

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 16
# Waits for the start signal, then builds in two parts with a pause; prints who built and the bytes.
RACER = """
import os, sys, time
from pathlib import Path
from vllm_moe_ep.deepgemm.build_lock import build_once
folder = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
def build(path):
    with open(path, "wb") as handle:
        handle.write(b"first %d " % os.getpid())
        handle.flush()
        time.sleep(0.5)
        handle.write(b"second")
built = build_once(folder / "kernel.cubin", build)
print(int(built), os.getpid(), (folder / "kernel.cubin").read_bytes().decode(), flush=True)
"""


def _race(folder: Path) -> list[str]:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for _ in range(NUM_PROCESSES)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    printed = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * NUM_PROCESSES
    return printed


@pytest.mark.parametrize("state", ["no folder", "empty artifact", "lock of a dead process"])
def test_one_of_many_builds_and_all_read_the_same(tmp_path: Path, state: str) -> None:
    folder = tmp_path / "a" / "cache"
    if state != "no folder":
        folder.mkdir(parents=True)
    if state == "empty artifact":
        (folder / "kernel.cubin").touch()
    if state == "lock of a dead process":
        (folder / "kernel.cubin.lock").write_text("999999999\n")
    lines = [line.split(" ", 2) for line in _race(folder)]
    builders = [pid for built, pid, _ in lines if built == "1"]
    assert len(builders) == 1
    assert {content for _, _, content in lines} == {f"first {builders[0]} second\n"}
    assert {file.name for file in folder.iterdir()} == {"kernel.cubin", "kernel.cubin.lock"}


def test_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from vllm_moe_ep.deepgemm.build_lock import exclusive_lock\n"
        "with exclusive_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(TimeoutError, match=f"held {lock} for more than 0.1 s"):
            with exclusive_lock(lock, timeout_s=0.1):
                pytest.fail("two processes hold one lock")
        holder.kill()
    with exclusive_lock(lock, timeout_s=5.0):
        assert lock.exists()


def test_a_waiter_finds_what_the_holder_built(tmp_path: Path) -> None:
    artifact = tmp_path / "kernel"
    with open(tmp_path / "kernel.lock", "ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            build_once(artifact, lambda path: pytest.fail("built without the lock"), 0.05)
        artifact.write_bytes(b"done")
    assert not build_once(artifact, lambda path: pytest.fail("built twice"), 0.05)
    assert artifact.read_bytes() == b"done"


def test_failed_and_empty_builds_leave_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    artifact = tmp_path / "kernel"

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("nvcc died")

    with pytest.raises(RuntimeError, match="nvcc died"):
        build_once(artifact, fail)
    with pytest.raises(ValueError, match="wrote nothing"):
        build_once(artifact, lambda path: None)
    assert not artifact.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["kernel.lock"]
    assert build_once(artifact, lambda path: path.write_bytes(b"whole") and None)
    assert artifact.read_bytes() == b"whole"


def test_a_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        build_once(tmp_path / "file" / "kernel", lambda path: None)
