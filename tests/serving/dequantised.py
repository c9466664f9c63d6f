"""The right answer for a quantised checkpoint: Hugging Face's model of its exact numbers, fp32.

The stored codes are decoded by the tests' own tables, not by the project's.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quant_oracle
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

_SCALE_NAMES = ("_scale_inv", ".scale")


def float_model(directory: Path, **config_changes: Any) -> Any:
    """The checkpoint's model in float32; `config_changes` override config.json."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({**config, **config_changes}))
        weights = _exact(load_file(directory / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        # Not the Auto classes: vLLM, once imported, registers configurations of its own there.
        model_class = getattr(transformers, config["architectures"][0])
        model, loading = model_class.from_pretrained(
            folder,
            config=model_class.config_class.from_pretrained(folder),
            dtype=torch.float32,
            output_loading_info=True,
        )
    assert not loading["missing_keys"] and not loading["unexpected_keys"], loading
    return model.eval()


def _exact(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv", tensors.get(f"{name[:-6]}scale"))
        if name.endswith(".weight") and scale is not None:
            is_fp4 = tensor.dtype is torch.int8
            block = (1, 32) if is_fp4 else (128, 128)
            values = tensor.view(torch.uint8) if is_fp4 else tensor
            weights[name] = quant_oracle.dequantise(values, scale, *block).float()
        elif not name.endswith(_SCALE_NAMES):
            weights[name] = tensor if tensor.dtype is torch.int64 else tensor.float()
    return weights


def token_logprobs(model: Any, windows: Sequence[Sequence[int]]) -> Tensor:
    """fp64, log p of every token but the first of each window, one after the other."""
    found = []
    for window in windows:
        logprobs = _logprobs(model, window)
        found.append(logprobs[:-1].gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    return torch.cat(found)


def loss_against_best(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """fp64, by how much the best token's logprob exceeds that of each token of `answer`."""
    logprobs = _logprobs(model, [*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return logprobs.max(dim=1).values - chosen


def _logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's; NaN if anything in them is not finite."""
    assert first.shape == second.shape and len(first) > 1000
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1])
