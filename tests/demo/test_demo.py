"""The demo succeeds only if everything in it held. vLLM is replaced by the fake server."""

import argparse
import sys
from pathlib import Path

import pytest

from vllm_moe_ep.demo import cli, demo
from vllm_moe_ep.errors import SettingsError

FAKE_SERVER = Path(__file__).parent / "fake_server.py"


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of a demo that holds."""
    program = tmp_path / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_SERVER}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(demo, "vllm_program", lambda: str(program))
    monkeypatch.setattr(demo, "available_cpus", lambda: [0, 1])
    model = tmp_path / "model"
    model.mkdir()
    (model / "heldout.txt").write_text("abcdefghijklmnop")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(["--model", str(model), "--cache-dir", str(tmp_path / "cache")])


def test_success(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(args) == 0
    output = capsys.readouterr().out
    assert "--moe-backend static-ep -tp 2 --enable-expert-parallel" in output
    assert "worker 2 of 2: static-ep: replaced 2 of 2 DeepSeek MoE layers" in output
    assert "tokens/s" in output
    assert "perplexity of 16 held-out tokens" in output
    assert "a" * 48 in output, "the completions are printed"
    for name in ("static-ep", "stock"):
        assert (args.cache_dir / "logs" / f"demo-{name}.log").is_file()


@pytest.mark.parametrize("shift", ["0.002", "-0.002", "nan"])
def test_other_perplexity_fails(
    args: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shift: str,
) -> None:
    monkeypatch.setenv("FAKE_SHIFT", shift)
    assert cli.run(args) == 1
    assert "disagree" in capsys.readouterr().err


def test_perplexity_within_the_bound_holds(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SHIFT", "0.0009")
    assert cli.run(args) == 0


@pytest.mark.parametrize("num_ranks", ["0", "1"])
def test_rank_without_our_layer_fails(
    args: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_ranks: str,
) -> None:
    monkeypatch.setenv("FAKE_RANKS", num_ranks)
    assert cli.run(args) == 1
    assert f"says so of {num_ranks}" in capsys.readouterr().err


def test_one_cpu_is_too_few(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "available_cpus", lambda: [0])
    assert cli.run(args) == 1
    assert "2 ranks need a CPU each, but this process may use 1" in capsys.readouterr().err


def test_model_without_heldout_text(
    args: argparse.Namespace,
) -> None:
    (args.model / "heldout.txt").unlink()
    with pytest.raises(SettingsError, match="heldout.txt does not exist. It is the text"):
        cli.run(args)


def test_dying_server_is_explained(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(demo.vllm_program())
    program.write_text("#!/bin/sh\necho 'ValueError: no such model'\nexit 1\n")
    assert cli.run(args) == 1
    error = capsys.readouterr().err
    assert "ValueError: no such model" in error
    assert "demo-static-ep.log" in error


def test_interruption(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: demo.DemoOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_demo", interrupted)
    assert cli.run(args) == 130
    assert "interrupted" in capsys.readouterr().err


def test_foreign_folder_in_the_cache_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "deepseek-v3-small"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(SettingsError, match="remove .*deepseek-v3-small: the demo then makes"):
        demo.cached_model(tmp_path)
