"""Files of a checkpoint that are damaged or missing: found before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters.checkpoints import write
from tests.adapters.conftest import DEEPSEEK_V3
from vllm_moe_ep.adapters.vllm.checkpoint_files import INDEX_NAME, check_files, read_header
from vllm_moe_ep.errors import CheckpointError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {FIRST: {"a": torch.ones(3, 4)}, SECOND: {"b": torch.ones(5), "c": torch.ones(1)}}
    write(tmp_path, DEEPSEEK_V3, files, index=True)
    return tmp_path


def test_whole_checkpoint(folder: Path) -> None:
    check_files(folder)
    (folder / INDEX_NAME).unlink()
    check_files(folder)


def _cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


FAULTS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "empty": (lambda f: (f / FIRST).write_bytes(b""), FIRST, "is empty"),
    "three bytes": (lambda f: _cut(f / FIRST, 3), FIRST, "is no safetensors file"),
    "cut in its header": (lambda f: _cut(f / FIRST, 20), FIRST, "cut off within its header"),
    "cut by a byte": (lambda f: _cut(f / FIRST, -1), FIRST, "47 bytes follow its header"),
    "longer": (lambda f: (f / FIRST).open("ab").write(b"x"), FIRST, "49 bytes follow its header"),
    "another file": (lambda f: (f / FIRST).write_text("<html>" * 99), FIRST, "no safetensors"),
    "folder": (lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()), INDEX_NAME, "no such file"),
    "gone": (lambda f: (f / SECOND).unlink(), INDEX_NAME, f"names {SECOND}, but there is no"),
    "exchanged": (
        lambda f: (f / SECOND).write_bytes((f / FIRST).read_bytes()),
        SECOND,
        "lacks b, which model.safetensors.index.json says it holds",
    ),
    "index that is no JSON": (lambda f: (f / INDEX_NAME).write_text("{"), INDEX_NAME, "weight_map"),
    "index of lists": (
        lambda f: (f / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": [FIRST]}})),
        INDEX_NAME,
        "names something but files",
    ),
    "binary index": (lambda f: (f / INDEX_NAME).write_bytes(b"\x80"), INDEX_NAME, "is damaged"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_with_its_file(folder: Path, fault: str) -> None:
    spoil, name, said = FAULTS[fault]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        check_files(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / name} ")
    assert said in text and text.endswith(".")


def test_configuration_is_refused_before_the_engine_starts(folder: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    (folder / FIRST).write_bytes(b"")
    arguments = {"model": str(folder), "skip_tokenizer_init": True, "max_model_len": 128}
    with pytest.raises(CheckpointError, match=f"{FIRST} is empty"):
        EngineArgs(**arguments, moe_backend="static-ep").create_engine_config()
    EngineArgs(**arguments).create_engine_config()
    EngineArgs(**arguments, moe_backend="static-ep", load_format="dummy").create_engine_config()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=100), length=st.none() | st.integers(0, 2**63))
def test_any_file_is_read_or_refused(tmp_path: Path, content: bytes, length: int | None) -> None:
    start = b"" if length is None else length.to_bytes(8, "little")
    file = tmp_path / "any.safetensors"
    file.write_bytes(start + content)
    try:
        read_header(file)
    except CheckpointError as error:
        assert str(error).startswith(str(file))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.recursive(
        st.none() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "data_offsets", "__metadata__"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "any.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        read_header(file)
    except CheckpointError as error:
        assert str(error).startswith(str(file))
