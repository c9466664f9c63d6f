"""The training text: the Python standard library's own sources."""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Never trained on; present in every Python from 3.11 on and small enough to score in seconds.
HELDOUT_FILES = (
    "bisect.py",
    "sched.py",
    "csv.py",
    "graphlib.py",
    "queue.py",
    "shlex.py",
    "textwrap.py",
)
# These make up `heldout.txt`, the short text for comparing two servers.
SHORT_HELDOUT_FILES = HELDOUT_FILES[:2]

# Tests and demos; tables of numbers rather than code (encodings, pydoc_data); parts that some
# distributions package apart, so that the text would depend on what is installed.
_SKIPPED_FOLDERS = frozenset(
    "__phello__ __pycache__ dist-packages distutils encodings ensurepip idlelib lib-dynload "
    "lib2to3 pydoc_data site-packages test tests tkinter turtledemo venv".split()
)
_SKIPPED_FILES = frozenset({"turtle.py"})
# Written when Python is built: build folders and compiler flags of one machine.
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Source texts in order of their path; lines end in a bare newline.

    Attributes:
        train: every text but the held-out ones.
        heldout: the texts of `HELDOUT_FILES`, in that order.
        short_heldout: about 10 KB, the texts of `SHORT_HELDOUT_FILES` joined.
    """

    train: tuple[str, ...]
    heldout: tuple[str, ...]
    short_heldout: str

    @property
    def sha256(self) -> str:
        """Hash of the training text, to tell corpora of two Python versions apart."""
        digest = hashlib.sha256()
        for text in self.train:
            digest.update(text.encode() + b"\0")
        return digest.hexdigest()


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library's sources, held-out files apart.

    Args:
        root: the library's folder; None means that of the running Python.

    Raises:
        FileNotFoundError: a held-out file is missing, so this is no complete standard library.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    missing = [name for name in HELDOUT_FILES if not (root / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"The Python sources in {root} are the training text, but {', '.join(missing)} is not "
            "there: use a Python whose standard library is installed as plain .py files."
        )
    names = sorted(_source_names(root) - set(HELDOUT_FILES))
    return Corpus(
        train=tuple(_read(root / name) for name in names),
        heldout=tuple(_read(root / name) for name in HELDOUT_FILES),
        short_heldout="\n".join(_read(root / name) for name in SHORT_HELDOUT_FILES),
    )


def _source_names(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in _walk(root)}


def _walk(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(_SKIPPED_PREFIXES):
            continue
        if path.is_dir():
            if path.name not in _SKIPPED_FOLDERS:
                yield from _walk(path)
        elif path.suffix == ".py" and path.name not in _SKIPPED_FILES:
            yield path


def _read(path: Path) -> str:
    # Universal newlines: a checkout with CRLF gives the same text.
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read()
