"""A directory appears at once and complete, or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_moe_ep.errors import SettingsError


@contextmanager
def build_beside(directory: Path, replace: bool) -> Iterator[Path]:
    """Yield an empty folder beside `directory`; it takes that place if the block succeeds.

    After an error nothing has changed.

    Args:
        directory: does not exist or, unless `replace`, is empty.
        replace: what `directory` holds when the block is done is removed.

    Raises:
        SettingsError: the folder cannot be created beside `directory`, or something came to lie
            in `directory` in the meantime.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        workshop = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise SettingsError(
            f"The model is built beside {directory}, but {error.filename} cannot be written "
            f"({error.strerror}): name a directory in a place that can."
        ) from error
    try:
        built = workshop / "new"
        built.mkdir()
        yield built
        for path in built.iterdir():
            # Some writers leave files that only their owner can read.
            path.chmod(0o644)
        if replace and directory.exists():
            directory.rename(workshop / "old")
        _move(built, directory)
    finally:
        shutil.rmtree(workshop)


def _move(built: Path, directory: Path) -> None:
    try:
        built.rename(directory)
    except OSError as error:
        raise SettingsError(
            f"The model is ready, but {directory} has come to exist meanwhile and is no empty "
            "directory: name another one."
        ) from error
