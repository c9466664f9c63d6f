"""What make-model does with the directory it is given; no model is made here."""

import json
import sys
from pathlib import Path

import pytest

from vllm_moe_ep.cli.main import main
from vllm_moe_ep.errors import SettingsError, UnsupportedError
from vllm_moe_ep.make_model import MakeModelOptions, ModelReport, make_model
from vllm_moe_ep.make_model.manifest import MANIFEST_NAME, find_finished_model, write_manifest
from vllm_moe_ep.make_model.publish import build_beside
from vllm_moe_ep.make_model.requirements import require_modules


def _finished(directory: Path, options: MakeModelOptions) -> ModelReport:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"12345")
    report = ModelReport(directory, False, 10, 3.0, 60.0, 570.0, 2.0, "ab", 1.5)
    write_manifest(directory, options, report)
    return report


def test_a_finished_model_is_kept(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    options = MakeModelOptions(directory, num_steps=7)
    report = _finished(directory, options)
    kept = make_model(options)
    assert kept.reused
    assert kept.heldout_perplexity == report.heldout_perplexity


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_steps": 8}, "num_steps is 7, not 8"),
        ({"num_steps": 7, "seed": 1}, "seed is 0, not 1"),
        ({"random": True}, "random is False, not True"),
        ({"num_steps": 7, "weight_dtype": "bfloat16"}, "weight_dtype is float32, not bfloat16"),
    ],
)
def test_other_options_need_force(tmp_path: Path, changes: dict, reason: str) -> None:
    directory = tmp_path / "model"
    _finished(directory, MakeModelOptions(directory, num_steps=7))
    with pytest.raises(SettingsError, match=f"{reason}.*--force"):
        make_model(MakeModelOptions(directory, **changes))
    assert find_finished_model(MakeModelOptions(directory, force=True, **changes)) is None


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    options = MakeModelOptions(directory)
    _finished(directory, options)
    (directory / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(SettingsError, match="model.safetensors is missing or was changed"):
        make_model(options)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("manifest", [None, "{", "[]", json.dumps({"recipe": {}})])
def test_a_foreign_directory_is_never_touched(
    tmp_path: Path, manifest: str | None, force: bool
) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    if manifest is not None:
        (tmp_path / MANIFEST_NAME).write_text(manifest)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SettingsError, match="will not overwrite it"):
        make_model(MakeModelOptions(tmp_path, force=force))
    assert sorted(tmp_path.iterdir()) == before


def test_bad_places_exit_2_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for place, reason in (("file", "is a file"), (".", "current"), ("file/model", "built beside")):
        assert main(["make-model", place, "--quiet"]) == 2
        assert reason in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words",
    [["--random", "--steps", "5"], ["--steps", "0"], ["--seed", "-1"], ["--threads", "0"]],
)
def test_bad_options_exit_2(tmp_path: Path, words: list[str]) -> None:
    assert main(["make-model", str(tmp_path / "model"), *words]) == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match="pip install transformers tokenizers"):
        require_modules()


def test_an_interrupted_build_leaves_the_old_model(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    _finished(directory, MakeModelOptions(directory))
    with pytest.raises(KeyboardInterrupt), build_beside(directory, replace=True) as folder:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (directory / "model.safetensors").read_bytes() == b"12345"


def test_a_finished_build_replaces_the_old_model(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    _finished(directory, MakeModelOptions(directory))
    with build_beside(directory, replace=True) as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in directory.iterdir()] == ["new"]


def test_files_that_appear_during_the_build_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with (
        pytest.raises(SettingsError, match="meanwhile"),
        build_beside(directory, replace=False) as folder,
    ):
        (folder / "new").write_text("x")
        directory.mkdir()
        (directory / "precious.txt").write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in directory.iterdir()] == ["precious.txt"]
