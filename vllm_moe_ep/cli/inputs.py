"""Paths and JSON that a user hands over: every fault of them is one sentence, no traceback."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_moe_ep.errors import SettingsError

MAX_BYTES = 16 * 2**20
"""Far above any config.json or text that is read here; a larger file is another one."""


def path_of(option: str) -> Callable[[str], Path]:
    """The `type` of an option that takes a path. An empty one would mean the current folder."""

    def parse(text: str) -> Path:
        if not text:
            raise SettingsError(f"{option} is empty: name a file or a folder.")
        if "\0" in text:
            raise SettingsError(f"{option} {text!r} holds a null character, which no path can.")
        return Path(text)

    return parse


def read_text(file: Path, option: str) -> str:
    """The text of a small file.

    Raises:
        SettingsError: it cannot be read, is no regular file, too large or no UTF-8 text; names
            `option`, the file and the reason.
    """
    named = f"{option} {file}"
    try:
        info = file.stat()
        if stat.S_ISDIR(info.st_mode):
            raise SettingsError(f"{named} is a folder, but a file is wanted.")
        if not stat.S_ISREG(info.st_mode):
            raise SettingsError(f"{named} is no regular file.")
        if info.st_size > MAX_BYTES:
            raise SettingsError(
                f"{named} has {info.st_size / 2**20:.0f} MiB, but at most "
                f"{MAX_BYTES // 2**20} MiB are read: is it another file?"
            )
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES)
    except FileNotFoundError as error:
        raise SettingsError(f"{named} does not exist.") from error
    except OSError as error:
        raise SettingsError(f"{named} cannot be read: {error.strerror}.") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"{named} is no text in UTF-8: its byte {error.start} is 0x{content[error.start]:02x}."
        ) from error


def read_json_object(file: Path, option: str) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises:
        SettingsError: as `read_text`, or it is no JSON object.
    """
    return parse_json_object(read_text(file, option), f"{option} {file}")


def parse_json_object(text: str, named: str) -> dict[str, Any]:
    """The JSON object that `text` is.

    Raises:
        SettingsError: it is none; begins with `named`.
    """
    if not text.strip():
        raise SettingsError(f"{named} is empty: it must hold a JSON object.")
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise SettingsError(f"{named} is nested too deeply to be read as JSON.") from error
    except ValueError as error:
        raise SettingsError(f"{named} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise SettingsError(
            f"{named} must hold a JSON object, found {type(value).__name__} instead."
        )
    return value
