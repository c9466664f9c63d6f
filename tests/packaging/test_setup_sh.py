"""Which Python the set-up takes. The pythons on PATH are fakes."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup.sh"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project folder with the script, and a PATH folder with the tools it needs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "setup.sh")
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname"):
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def add_python(tree: Path, name: str, version: str | None) -> None:
    """A fake interpreter; `version` None: a shim without an interpreter behind it."""
    supported = version in ("3.11", "3.12", "3.13")
    text = (
        "#!/bin/bash\n"
        f'case "$1" in -c) exit {0 if supported else 1};; '
        f'--version) echo "Python {version}.0";; '
        f'*) echo "{name} runs $*";; esac\n'
    )
    if version is None:
        text = "#!/bin/bash\nexit 127\n"
    path = tree / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def run(tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    bash = shutil.which("bash")
    assert bash
    return subprocess.run(
        [bash, str(tree / "scripts" / "setup.sh")],
        env={"PATH": str(tree / "bin"), **variables},
        capture_output=True,
        text=True,
    )


def test_python3_if_it_will_do(tree: Path) -> None:
    add_python(tree, "python3", "3.13")
    add_python(tree, "python3.12", "3.12")
    assert run(tree).stdout == "python3 runs scripts/setup_venv.py\n"


@pytest.mark.parametrize("version", ["3.10", "3.14", None])
def test_another_if_python3_will_not_do(tree: Path, version: str | None) -> None:
    add_python(tree, "python3", version)
    add_python(tree, "python3.12", None)
    add_python(tree, "python3.11", "3.11")
    assert run(tree).stdout == "python3.11 runs scripts/setup_venv.py\n"


def test_the_one_that_is_named(tree: Path) -> None:
    add_python(tree, "python3", "3.11")
    add_python(tree, "mine", "3.12")
    assert run(tree, PYTHON=str(tree / "bin" / "mine")).stdout.startswith("mine runs")


def test_none(tree: Path) -> None:
    add_python(tree, "python3", "3.9")
    result = run(tree)
    assert result.returncode == 1
    assert "Python 3.11, 3.12 or 3.13 is needed, and PATH has Python 3.9.0" in result.stderr
    assert result.stdout == ""


def test_no_python_at_all(tree: Path) -> None:
    result = run(tree)
    assert result.returncode == 1
    assert "no working python3" in result.stderr
