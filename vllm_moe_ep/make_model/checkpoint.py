"""Builds the model and writes its Hugging Face files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .architecture import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Spread of the selection biases of a random model: about that of its experts' sigmoid scores,
# so the biases change the choice of many tokens but do not make it.
_RANDOM_BIAS_STD = 0.05


def build_model(config: dict[str, Any], seed: int) -> "PreTrainedModel":
    """A float32 model with weights drawn from `seed`; the caller's random state is kept."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Both implementations are the fastest of their kind in training on a CPU.
        return DeepseekV3ForCausalLM._from_config(
            DeepseekV3Config(**config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="grouped_mm",
        )


def randomize_router_biases(model: "PreTrainedModel", seed: int) -> None:
    """Give the router biases of an untrained model values, so that they matter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=_RANDOM_BIAS_STD, generator=generator)


def cast_weights(model: "PreTrainedModel", weight_dtype: str) -> None:
    """Cast all weights in place; the router biases are buffers and stay float32."""
    import torch

    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, weight_dtype))


def save_model(model: "PreTrainedModel", config: dict[str, Any], directory: Path) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    with without_progress_bars():
        model.save_pretrained(directory)
    # Hugging Face's config class drops the keys that it does not know; vLLM needs some of them.
    _write_json(directory / "config.json", config)
    generation = {
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
    }
    _write_json(directory / "generation_config.json", generation)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hugging Face's libraries show none of theirs meanwhile."""
    from transformers.utils import logging

    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
