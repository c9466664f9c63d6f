"""Small checkpoints with random weights: DeepSeek-V3 in float32 and fp8, and DeepSeek-V4."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_moe_ep.make_model import quantised_v3, quantised_v4
from vllm_moe_ep.make_model.architecture import model_config
from vllm_moe_ep.make_model.architecture_v4 import v4_config
from vllm_moe_ep.make_model.checkpoint import build_model, save_model

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def make_tensors(kind: str) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors of a checkpoint; `kind` is v3, fp8 or v4."""
    config = model_config("float32")
    with TemporaryDirectory() as folder:
        # Only the files have the names of the checkpoint format.
        save_model(build_model(config, seed=0), config, Path(folder))
        tensors = load_file(Path(folder) / "model.safetensors")
    if kind == "v3":
        return config, tensors
    if kind == "fp8":
        return quantised_v3.fp8_config(config, "fp8"), quantised_v3.fp8_tensors(tensors, "fp8")
    return v4_config(config), quantised_v4.v4_tensors(tensors, config, 0)


def write(folder: Path, config: dict[str, Any], files: dict[str, Tensors], index: bool) -> None:
    """The checkpoint in one file or several, with an index or without."""
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if index:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
