"""make_model.json: written last, it tells a finished model and the options it was made with."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from vllm_moe_ep.cli.inputs import read_json_object
from vllm_moe_ep.errors import SettingsError

from .options import MakeModelOptions, ModelReport

MANIFEST_NAME = "make_model.json"
# Raise it when the same options begin to give another model.
_RECIPE_VERSION = 1
_STORED = [
    field for field in dataclasses.fields(ModelReport) if field.name not in ("directory", "reused")
]


def write_manifest(directory: Path, options: MakeModelOptions, report: ModelReport) -> None:
    """Record options, report and file sizes; every other file must be there already."""
    content = {
        "recipe_version": _RECIPE_VERSION,
        "recipe": options.recipe,
        "report": _stored_fields(report),
        "file_bytes": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
    }
    text = json.dumps(content, indent=2) + "\n"
    (directory / MANIFEST_NAME).write_text(text, encoding="utf-8")


def find_finished_model(options: MakeModelOptions) -> ModelReport | None:
    """The report of the model in the directory if it can be kept, None if one must be made.

    Raises:
        SettingsError: the directory holds something that must not be replaced.
    """
    try:
        return _find(options)
    except OSError as error:
        raise SettingsError(
            f"{options.directory} cannot be looked into ({error.strerror}): name another place."
        ) from error


def _find(options: MakeModelOptions) -> ModelReport | None:
    directory = options.directory
    if directory.resolve() == Path.cwd():
        raise SettingsError(
            f"The model's directory is put in place at once, so {directory} cannot be the current "
            "one: name a directory inside it or elsewhere."
        )
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise SettingsError(
            f"The model needs a directory, but {directory} is a file: name another place."
        )
    if not any(directory.iterdir()):
        return None
    manifest = _read_manifest(directory)
    if options.force:
        return None
    difference = _difference(manifest, options, directory)
    if difference is not None:
        raise SettingsError(
            f"{directory} holds a model that differs from the one asked for ({difference}): "
            "name another directory, or replace it with --force."
        )
    return ModelReport(directory=directory, reused=True, **_report_fields(manifest))


def _read_manifest(directory: Path) -> dict[str, Any]:
    try:
        manifest = read_json_object(directory / MANIFEST_NAME, "the manifest")
    except SettingsError:
        is_manifest = False
    else:
        objects = [manifest.get(name) for name in ("recipe", "report", "file_bytes")]
        is_manifest = "recipe_version" in manifest and all(isinstance(o, dict) for o in objects)
    if not is_manifest:
        raise SettingsError(
            f"{directory} is not empty and has no valid {MANIFEST_NAME}, so make-model did not "
            "make it and will not overwrite it: name a new or an empty directory."
        )
    return manifest


def _difference(manifest: dict[str, Any], options: MakeModelOptions, directory: Path) -> str | None:
    if manifest["recipe_version"] != _RECIPE_VERSION:
        return "made by another version of make-model"
    found = manifest["recipe"]
    wanted = options.recipe
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            return f"{key} is {found.get(key)}, not {wanted.get(key)}"
    for name, num_bytes in manifest["file_bytes"].items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            return f"{name} is missing or was changed"
    return None


def _report_fields(manifest: dict[str, Any]) -> dict[str, Any]:
    return {field.name: manifest["report"].get(field.name) for field in _STORED}


def _stored_fields(report: ModelReport) -> dict[str, Any]:
    return {field.name: getattr(report, field.name) for field in _STORED}
