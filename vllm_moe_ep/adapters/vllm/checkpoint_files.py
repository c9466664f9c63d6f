"""A checkpoint's safetensors files and their index, looked at before any number is read."""

import functools
import json
from pathlib import Path
from typing import Any

from vllm_moe_ep.errors import CheckpointError

_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""
_REMEDY = "Download it again."


def check_checkpoint(model_config: Any, load_config: Any) -> None:
    """`check_files` for the model that vLLM will load, where it lies in a local folder.

    Raises:
        CheckpointError: names the file, and what is wrong with it.
    """
    if model_config is None or load_config.load_format not in _SAFETENSORS_FORMATS:
        return
    folder = Path(model_config.model)
    # vLLM takes Mistral's own files first.
    if folder.is_dir() and not any(folder.glob("consolidated*.safetensors")):
        _check_once(folder.absolute())


@functools.cache
def _check_once(folder: Path) -> None:
    """vLLM builds several configurations in one process."""
    check_files(folder)


def check_files(folder: Path) -> None:
    """That every file of a checkpoint is whole, and its index names what is there.

    Nothing is checked where there is no safetensors file: vLLM takes other formats, too.

    Raises:
        CheckpointError: names the file, and what is wrong with it.
    """
    index = _index(folder)
    named = sorted(set(index.values()))
    for name in named:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder / INDEX_NAME} names {name}, but there is no such file. {_REMEDY}"
            )
    headers = {file.name: read_header(file) for file in _files(folder, named)}
    for tensor, name in index.items():
        if tensor not in headers[name]:
            raise CheckpointError(
                f"{folder / name} lacks {tensor}, which {INDEX_NAME} says it holds. {_REMEDY}"
            )


def find_tensor(folder: str, tensor: str) -> Path | None:
    """The file of a checkpoint that holds a tensor; None where that cannot be told."""
    if not Path(folder).is_dir():
        return None
    for file in _files(Path(folder), []):
        if tensor in read_header(file):
            return file
    return None


def read_header(file: Path) -> dict[str, Any]:
    """The names of a safetensors file's tensors, with type, shape and place.

    Raises:
        CheckpointError: the file is no safetensors file, or not as long as it must be.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            text = opened.read(min(length, _MAX_HEADER_BYTES))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    if size == 0:
        raise CheckpointError(f"{file} is empty. {_REMEDY}")
    if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{file} is no safetensors file. {_REMEDY}")
    if size < _LENGTH_BYTES + length:
        raise CheckpointError(f"{file} is cut off within its header. {_REMEDY}")
    return _tensors(file, text, size - _LENGTH_BYTES - length)


def _tensors(file: Path, text: bytes, num_bytes: int) -> dict[str, Any]:
    """What the header says, if the bytes after it are as many as it says."""
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        is_whole = bool(num_bytes == end)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file} has a damaged header. {_REMEDY}") from error
    if not is_whole:
        raise CheckpointError(
            f"{file} is damaged: {num_bytes} bytes follow its header, which asks for {end}. "
            f"{_REMEDY}"
        )
    return tensors


def _files(folder: Path, named: list[str]) -> list[Path]:
    """The files that vLLM reads: those of the index, or all that there are."""
    if named:
        return [folder / name for name in named]
    return sorted(folder.glob("*.safetensors"))


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> file; empty where there is no index."""
    file = folder / INDEX_NAME
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        is_map = all(isinstance(name, str) for name in weight_map.values())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: it has no valid weight_map.") from error
    if not is_map:
        raise CheckpointError(f"{file} is damaged: its weight_map names something but files.")
    return dict(weight_map)
