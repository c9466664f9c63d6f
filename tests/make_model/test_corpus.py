"""The training text: which files, in which order, and the held-out ones apart."""

from pathlib import Path

import pytest

from vllm_moe_ep.make_model.corpus import HELDOUT_FILES, SHORT_HELDOUT_FILES, read_corpus


def _fake_library(root: Path, names: list[str]) -> None:
    for name in [*HELDOUT_FILES, *names]:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"# {name}\r\nx = 1\n".encode())


def test_takes_sources_in_path_order_and_leaves_the_rest(tmp_path: Path) -> None:
    taken = ["http/client.py", "abc.py", "zoneinfo/_common.py"]
    left = ["test/a.py", "json/tests/b.py", "site-packages/c.py", "idlelib/d.py", "notes.txt"]
    left += ["_sysconfigdata__linux_.py", "config-3.11/e.py", "lib2to3/f.py"]
    _fake_library(tmp_path, taken + left)
    corpus = read_corpus(tmp_path)
    assert corpus.train == tuple(f"# {name}\nx = 1\n" for name in sorted(taken))
    assert corpus.heldout == tuple(f"# {name}\nx = 1\n" for name in HELDOUT_FILES)


def test_the_same_library_gives_the_same_hash(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        _fake_library(tmp_path / folder, ["abc.py", "os.py"])
    first, second = read_corpus(tmp_path / "one"), read_corpus(tmp_path / "two")
    assert first.sha256 == second.sha256
    (tmp_path / "two" / "os.py").write_text("x = 2\n")
    assert read_corpus(tmp_path / "two").sha256 != first.sha256


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="bisect.py.*plain .py files"):
        read_corpus(tmp_path)


def test_this_pythons_library_is_large_and_the_heldout_text_apart() -> None:
    corpus = read_corpus()
    assert sum(map(len, corpus.train)) > 5_000_000
    assert 8_000 <= len(corpus.short_heldout.encode()) <= 16_000
    assert not set(corpus.train) & set(corpus.heldout)
    assert all(text in corpus.short_heldout for text in corpus.heldout[: len(SHORT_HELDOUT_FILES)])
