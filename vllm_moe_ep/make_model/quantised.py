"""Quantised models, made from the trained one: files, and a score of what the numbers say."""

import dataclasses
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_moe_ep.cli.inputs import read_json_object
from vllm_moe_ep.errors import SettingsError

from . import quantised_v3, quantised_v4
from .architecture_v4 import v4_config
from .batches import encode_documents
from .checkpoint import without_progress_bars
from .corpus import read_corpus
from .evaluation import score_heldout
from .options import MakeModelOptions, ModelReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = quantised_v3.Tensors

_COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "heldout.txt")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Files of a quantised model.

    Attributes:
        config: config.json.
        tensors: what model.safetensors holds.
        floats: what those stand for, float32, under the names of the same layout.
    """

    config: dict[str, Any]
    tensors: Tensors
    floats: Tensors


def make_quantised_files(
    options: MakeModelOptions, source: ModelReport, folder: Path
) -> ModelReport:
    """Fill `folder` with a quantised model made from the float one in `source`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    start = time.monotonic()
    config = read_json_object(source.directory / "config.json", "--source")
    stored = source.directory / "model.safetensors"
    try:
        weights = load_file(stored)
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"--source {stored} cannot be read: {error}.") from error
    checkpoint = _quantise(options, config, weights)
    text = json.dumps(checkpoint.config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    save_file(checkpoint.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in _COPIED:
        shutil.copyfile(source.directory / name, folder / name)
    return _report(options, source, checkpoint, folder, start)


def _quantise(options: MakeModelOptions, config: dict[str, Any], weights: Tensors) -> Checkpoint:
    if options.quantisation == "v4":
        tensors = quantised_v4.v4_tensors(weights, config, options.seed)
        return Checkpoint(v4_config(config), tensors, quantised_v4.float_tensors(tensors))
    quantisation = str(options.quantisation)
    tensors = quantised_v3.fp8_tensors(weights, quantisation)
    fp8_config = quantised_v3.fp8_config(config, quantisation)
    return Checkpoint(fp8_config, tensors, quantised_v3.float_tensors(tensors))


def _report(
    options: MakeModelOptions,
    source: ModelReport,
    checkpoint: Checkpoint,
    folder: Path,
    start: float,
) -> ModelReport:
    from tokenizers import Tokenizer

    heldout = read_corpus().heldout
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    heldout_ids = encode_documents(tokenizer, heldout)
    model = _float_model(checkpoint)
    score = score_heldout(model, heldout_ids)
    num_heldout_bytes = sum(len(text.encode()) for text in heldout)
    return dataclasses.replace(
        source,
        directory=options.directory,
        reused=False,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        final_train_loss=None if options.quantisation == "v4" else source.final_train_loss,
        heldout_perplexity=score.perplexity,
        heldout_bits_per_byte=score.bits_per_byte(len(heldout_ids), num_heldout_bytes),
        seconds=time.monotonic() - start,
    )


def _float_model(checkpoint: Checkpoint) -> "PreTrainedModel":
    """Hugging Face's model of the numbers that the checkpoint stands for, in float32."""
    import torch
    import transformers
    from safetensors.torch import save_file

    config = {key: value for key, value in checkpoint.config.items() if "quantization" not in key}
    with tempfile.TemporaryDirectory() as name, without_progress_bars():
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(checkpoint.floats, folder / "model.safetensors", metadata={"format": "pt"})
        # Not its Auto classes: vLLM, once imported, registers configurations of its own there.
        model_class = getattr(transformers, config["architectures"][0])
        hf_config = model_class.config_class.from_pretrained(folder)
        return model_class.from_pretrained(folder, config=hf_config, dtype=torch.float32)
