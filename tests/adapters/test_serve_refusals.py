"""`vllm serve` with static-ep: refusals are one line; other errors and backends are untouched."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_ep.adapters.vllm import environment, serve_refusals
from vllm_moe_ep.errors import CheckpointError, SettingsError, UnsupportedError

OURS = {"moe_backend": "static_ep", "kernel_config": None, "model": "org/model"}
BY_JSON = {"moe_backend": "auto", "kernel_config": SimpleNamespace(moe_backend="static_ep")}
WORKER = """
import sys
from vllm_moe_ep.adapters.vllm import serve_refusals
from vllm_moe_ep.errors import CheckpointError

def load_model():
    raise CheckpointError(sys.argv[1])

try:
    serve_refusals.with_refusal_for_the_parent(load_model)()
except CheckpointError:
    sys.exit(3)
"""


def run(action: Callable[[], Any], **options: Any) -> Any:
    def cmd(args: Any) -> Any:
        return action()

    return serve_refusals.with_short_refusals(cmd)(SimpleNamespace(**options))


def failing(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("options", [OURS, BY_JSON])
@pytest.mark.parametrize("error", [CheckpointError, SettingsError, UnsupportedError])
def test_refusal_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(failing(error("do this.")), **options)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "vllm serve: do this.\n"


def test_other_backends_and_errors_are_untouched() -> None:
    assert run(lambda: "served", **OURS) == "served"
    for options in ({}, {"moe_backend": "auto"}, {**BY_JSON, "kernel_config": {}}):
        assert run(lambda: os.environ.get("STATIC_EP_REFUSAL_FILE"), **options) is None
        with pytest.raises(UnsupportedError):
            run(failing(UnsupportedError("x")), **options)
    with pytest.raises(RuntimeError, match="of vLLM"):
        run(failing(RuntimeError("of vLLM")), **OURS)


def test_refusals_of_workers_are_the_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def start() -> None:
        for text in ("a is cut off.", "b is\nempty.", "a is cut off."):
            command = [sys.executable, "-c", WORKER, text]
            worker = subprocess.run(command, timeout=60, capture_output=True)
            assert worker.returncode == 3, worker.stderr
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(SystemExit) as caught:
        run(start, **OURS)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "vllm serve: a is cut off.\nb is empty.\n"
    assert "STATIC_EP_REFUSAL_FILE" not in os.environ


def test_worker_whose_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATIC_EP_REFUSAL_FILE", "/proc/1/fd/nothing")
    environment.leave_refusal("nobody listens")


@pytest.mark.parametrize("option", ["model", "model_tag"])
def test_folder_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(SystemExit) as caught:
        run(lambda: pytest.fail("was started"), **{**OURS, option: absent})
    assert caught.value.code == 2
    assert (
        capsys.readouterr().err
        == f"vllm serve: The model {absent} does not exist: name its folder.\n"
    )
    assert run(lambda: "served", **{**OURS, option: str(tmp_path)}) == "served"
    assert run(lambda: "served", moe_backend="auto", model=absent) == "served"
