"""Whatever file or text is handed over: exit status 2 and one sentence, never a traceback."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_moe_ep.bench import cli as bench_cli
from vllm_moe_ep.cli.main import main
from vllm_moe_ep.demo import demo
from vllm_moe_ep.envs import VARIABLES, load_settings
from vllm_moe_ep.errors import SettingsError

MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
}
PLAN = ["plan", "--platform", "trn2", "--ep-size", "2", "--batch", "3", "--model"]
BENCH = ["bench", "--platform", "cpu", "--model"]
COMMANDS = {"plan": PLAN, "bench": BENCH}
each_command = pytest.mark.parametrize("command", COMMANDS)
fuzz = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cli, "_measure_format", lambda options, form: [])


def refusal_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence that a command ends with."""
    capsys.readouterr()
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"vllm-moe-ep {words[0]}: ")
    assert lines[0].endswith((".", "?"))
    return lines[0]


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "binary": (lambda path: path.write_bytes(b"\x80\x00\xff" * 99), "no text in UTF-8: its byte 0"),
    "empty": (lambda path: path.write_bytes(b""), "is empty"),
    "blank": (lambda path: path.write_text(" \n"), "is empty"),
    "huge": (_sparse, "has 1024 MiB, but at most 16"),
    "deep": (lambda path: path.write_text("[" * 10**6), "nested too deeply"),
    "deep object": (lambda path: path.write_text('{"a":' * 10**5), "nested too deeply"),
    "list": (lambda path: path.write_text("[1]"), "JSON object, found list"),
    "null": (lambda path: path.write_text("null"), "JSON object, found NoneType"),
    "cut off": (lambda path: path.write_text('{"a": '), "is not JSON"),
    "long number": (lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"), "is not JSON"),
    "fifo": (_fifo, "is no regular file"),
    "folder": (Path.mkdir, "config.json does not exist"),
    "folder of a folder": (lambda path: (path / "config.json").mkdir(parents=True), "is a folder"),
    "unreadable": (lambda path: path.symlink_to("/proc/self/mem"), "cannot be read"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    "loop": (lambda path: path.symlink_to(path), "cannot be"),
    "missing": (lambda path: None, "does not exist"),
    "dense model": (lambda path: path.write_text('{"hidden_size": 64}'), "no n_routed_experts"),
}


@each_command
@pytest.mark.parametrize("kind", FILES)
def test_file(command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said = FILES[kind]
    path = tmp_path / "model"
    make(path)
    sentence = refusal_of([*COMMANDS[command], str(path)], capsys)
    assert said in sentence
    assert str(path) in sentence
    assert " plan" not in sentence.removeprefix(f"vllm-moe-ep {command}")


PATH_OPTIONS = {
    "plan": (PLAN, "--model"),
    "bench": (BENCH, "--model"),
    "bench plot": (["bench", "--plot"], "--plot"),
    "make-model": (["make-model"], "DIR"),
    "make-model source": (["make-model", "x", "--format", "fp8", "--source"], "--source"),
    "demo": (["demo", "--model"], "--model"),
    "demo cache": (["demo", "--cache-dir"], "--cache-dir"),
}


@pytest.mark.parametrize("option", PATH_OPTIONS)
def test_no_path_at_all(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, name = PATH_OPTIONS[option]
    assert f"{name} is empty: name a file" in refusal_of([*words, ""], capsys)
    assert "null character" in refusal_of([*words, "a\0b"], capsys)


@pytest.mark.parametrize("words", [PLAN, BENCH, ["make-model"], ["demo", "--model"]])
def test_name_that_is_too_long(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in refusal_of([*words, "x" * 5000], capsys)


@pytest.mark.parametrize("kind", ["binary", "huge", "unreadable", "missing", "folder"])
def test_heldout_text_of_the_demo(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "available_cpus", lambda: [0, 1])
    FILES[kind][0](tmp_path / "heldout.txt")
    words = ["demo", "--cache-dir", str(tmp_path / "cache"), "--model", str(tmp_path)]
    assert f"{tmp_path / 'heldout.txt'} " in refusal_of(words, capsys)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_time_that_the_demo_cannot_wait(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "positive number" in refusal_of(["demo", "--startup-timeout", seconds], capsys)


@pytest.mark.parametrize("kind", ["binary", "empty", "deep", "huge", "unreadable", "list"])
def test_manifest_in_the_folder_of_a_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FILES[kind][0](tmp_path / "make_model.json")
    assert "will not overwrite it" in refusal_of(["make-model", str(tmp_path)], capsys)


@pytest.mark.parametrize("missing", ["recipe", "report", "file_bytes"])
def test_manifest_without_a_part(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Any] = {"recipe_version": 1, "recipe": {}, "report": {}, "file_bytes": {}}
    parts[missing] = 3
    (tmp_path / "make_model.json").write_text(json.dumps(parts))
    assert "will not overwrite it" in refusal_of(["make-model", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["make-model", "x", "--seed", "9" * 30],
        ["make-model", "x", "--threads", "9" * 9],
        [*PLAN, "x", "--batch", "9" * 400],
        [*PLAN, "x", "--ep-size", "9" * 400],
        [*BENCH[:-1], "--tokens", "9" * 30],
        [*BENCH[:-1], "--num-experts", "9" * 30],
        [*BENCH[:-1], "--bandwidth-tbs", "nan"],
        [*BENCH[:-1], "--bf16-pflops", "0"],
    ],
)
def test_number_out_of_range(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refusal_of(words, capsys)


@pytest.mark.parametrize("kind", ["binary", "empty", "folder", "list", "missing"])
def test_source_whose_files_are_damaged(kind: str, tmp_path: Path) -> None:
    from vllm_moe_ep.make_model import MakeModelOptions
    from vllm_moe_ep.make_model.quantised import make_quantised_files

    source: Any = SimpleNamespace(directory=tmp_path)
    options = MakeModelOptions(tmp_path / "x", weight_dtype="bfloat16", quantisation="fp8")
    FILES[kind][0](tmp_path / "config.json")
    with pytest.raises(SettingsError, match="--source .*config.json"):
        make_quantised_files(options, source, tmp_path)
    source.directory = tmp_path / "other"
    source.directory.mkdir()
    (source.directory / "config.json").write_text("{}")
    FILES[kind][0](source.directory / "model.safetensors")
    with pytest.raises(SettingsError, match="--source .*model.safetensors cannot be read"):
        make_quantised_files(options, source, tmp_path)


def test_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the file system that no check foresaw."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "model.safetensors"))

    monkeypatch.setattr("vllm_moe_ep.make_model.cli.make_model", full)
    sentence = refusal_of(["make-model", str(tmp_path / "new")], capsys)
    assert "model.safetensors cannot be used: No space left on device." in sentence


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**20, max_value=10**400)
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
CONFIG_KEYS = [
    *MOE,
    *("n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "text_config"),
    *("quantization_config", "torch_dtype", "dtype", "expert_dtype", "model_type"),
]


def _runs_or_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    status = main(words)
    lines = capsys.readouterr().err.splitlines()
    assert (status, len(lines)) in ((0, 0), (2, 1)), lines


@each_command
@fuzz
@given(content=st.binary(max_size=200) | JSON_VALUES.map(lambda v: json.dumps(v).encode()))
def test_any_file(
    command: str,
    content: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "any.json").write_bytes(content)
    _runs_or_refuses([*COMMANDS[command], str(tmp_path / "any.json")], capsys)


@each_command
@fuzz
@given(changes=st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON_VALUES, min_size=1))
def test_any_config(
    command: str,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MOE, **changes}))
    _runs_or_refuses([*COMMANDS[command], str(tmp_path)], capsys)


SIZES = st.integers(min_value=0, max_value=2**20 + 1) | st.integers(min_value=1, max_value=600)


@settings(fuzz, max_examples=40)
@given(
    sizes=st.fixed_dictionaries({name: SIZES for name in MOE if name != "num_hidden_layers"}),
    fp8=st.booleans(),
    batch=st.integers(min_value=0, max_value=2**31) | st.integers(min_value=1, max_value=128),
    ep_size=SIZES,
)
def test_any_size_of_a_plan(
    sizes: dict[str, int],
    fp8: bool,
    batch: int,
    ep_size: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quantisation = {"quantization_config": {"quant_method": "fp8"}} if fp8 else {}
    (tmp_path / "config.json").write_text(json.dumps({**MOE, **sizes, **quantisation}))
    numbers = ["--ep-size", str(ep_size), "--batch", str(batch)]
    words = ["plan", "--platform", "trn2", *numbers, "--model", str(tmp_path)]
    _runs_or_refuses(words, capsys)


@fuzz
@given(text=st.text(max_size=40) | JSON_VALUES.map(json.dumps))
def test_any_additional_config(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _runs_or_refuses(["env", f"--additional-config={text}"], capsys)


@pytest.mark.parametrize("text", ["", "[" * 10**5, '{"moe_ep": ' * 10**5, "9" * 5000, "null", "1"])
def test_additional_config_that_is_no_object(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--additional-config " in refusal_of(["env", f"--additional-config={text}"], capsys)


NAMES = [variable.name for variable in VARIABLES]


@fuzz
@given(overrides=JSON_VALUES | st.dictionaries(st.sampled_from(NAMES) | st.text(), JSON_VALUES))
def test_any_override_is_taken_or_named(overrides: Any) -> None:
    try:
        load_settings(overrides, environ={})
    except SettingsError as error:
        assert "moe_ep" in str(error)


@fuzz
@given(
    environ=st.dictionaries(
        (st.sampled_from(NAMES) | st.text(max_size=12)).map(lambda n: f"VLLM_MOE_EP_{n.upper()}"),
        st.text(max_size=12) | st.integers().map(str) | st.just("9" * 5000),
        min_size=1,
    )
)
def test_any_variable_is_taken_or_named(environ: dict[str, str]) -> None:
    try:
        load_settings(environ=environ)
    except SettingsError as error:
        assert any(name in str(error) for name in environ)


@pytest.mark.parametrize("kind", ["binary", "empty", "deep", "huge", "fifo", "long number", "list"])
def test_doctor_with_a_toolkit_that_is_no_toolkit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_bytes(b"\x80binary")
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    FILES[kind][0](tmp_path / "version.json")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main(["doctor", "--json"]) in (0, 1)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["deepgemm"]


def test_path_that_is_no_text(tmp_path: Path) -> None:
    """Bytes that the terminal's encoding cannot show, in a process of its own."""
    words = ["-m", "vllm_moe_ep.cli.main", *PLAN, os.fsencode(tmp_path) + b"/\xff.json"]
    done = subprocess.run([sys.executable, *words], capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr
    assert b"does not exist." in done.stderr
