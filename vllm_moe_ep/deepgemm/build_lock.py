"""Let one of many processes build a file while the others wait for it.

The lock is the kernel's (`flock`), which goes with its holder: a lock file left by a dead process
blocks nobody. The file appears under its name only when it is complete.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_TIMEOUT_S = 600.0
_POLL_S = 0.02


@contextmanager
def exclusive_lock(lock_file: Path, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock while the block runs; the file and its folder are made if absent.

    Raises:
        TimeoutError: another process holds it for longer than `timeout_s`.
        OSError: the folder cannot be made or written.
    """
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    # The file is never removed: a process that waits on a removed one would hold no lock.
    with open(lock_file, "ab") as handle:
        _acquire(handle.fileno(), lock_file, timeout_s)
        yield


def _acquire(descriptor: int, lock_file: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"Another process has held {lock_file} for more than {timeout_s:g} s: find "
                    "it with fuser or lsof and end it, or wait longer."
                ) from None
        time.sleep(_POLL_S)


def build_once(
    artifact: Path, build: Callable[[Path], None], timeout_s: float = DEFAULT_TIMEOUT_S
) -> bool:
    """Make `artifact` unless it exists; of all processes that ask, one calls `build`.

    An empty file counts as absent: it is what a full disk or a crash leaves.

    Args:
        build: writes the whole content to the path it is given, in the artifact's folder.

    Returns:
        Whether this process built it.

    Raises:
        TimeoutError: another process has been building for longer than `timeout_s`.
        ValueError: `build` wrote nothing.
        OSError: the folder cannot be made or written.
    """
    if _is_complete(artifact):
        return False
    with exclusive_lock(artifact.with_name(f"{artifact.name}.lock"), timeout_s):
        if _is_complete(artifact):
            return False
        _build_and_publish(artifact, build)
    return True


def _is_complete(artifact: Path) -> bool:
    """Opened, not only looked up: a network file system revalidates on open."""
    try:
        with open(artifact, "rb") as handle:
            return handle.seek(0, os.SEEK_END) > 0
    except FileNotFoundError:
        return False


def _build_and_publish(artifact: Path, build: Callable[[Path], None]) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f"{artifact.name}.", dir=artifact.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        build(partial)
        with open(partial, "rb") as handle:
            if handle.seek(0, os.SEEK_END) == 0:
                raise ValueError(f"The build of {artifact} wrote nothing to {partial}.")
            os.fsync(handle.fileno())
        os.replace(partial, artifact)
    finally:
        partial.unlink(missing_ok=True)
