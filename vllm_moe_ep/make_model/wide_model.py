"""A copy of a model with other sizes and random weights: text, but nothing to say."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import build_model, cast_weights, save_model
from .publish import build_beside

WEIGHT_DTYPE = "bfloat16"
_KEPT = ("tokenizer.json", "tokenizer_config.json", "heldout.txt")


def make_wide_model(source: Path, directory: Path, sizes: Mapping[str, Any]) -> Path:
    """Write the model to `directory`, unless one of these sizes is there, and return that.

    Its routers are random too, so that tokens spread over the experts; vLLM's dummy weights send
    nearly all tokens to the same few.

    Args:
        source: a folder that `make_model` filled.
        sizes: keys of config.json to replace.

    Raises:
        SettingsError: `directory` holds something else, or cannot be written.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {**sizes, "dtype": WEIGHT_DTYPE, "torch_dtype": WEIGHT_DTYPE}
    written = directory / "config.json"
    if written.is_file() and json.loads(written.read_text(encoding="utf-8")) == config:
        return directory
    with build_beside(directory, replace=False) as folder:
        model = build_model(config, seed=0)
        cast_weights(model, WEIGHT_DTYPE)
        save_model(model, config, folder)
        for name in _KEPT:
            shutil.copyfile(source / name, folder / name)
    return directory
