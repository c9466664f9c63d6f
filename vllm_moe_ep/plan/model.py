"""The numbers of a model that its MoE layers' cost depends on, from its config.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_ep.errors import SettingsError, UnsupportedError

# Bytes of one number with its share of a scale: FP4 has a byte per 32 numbers, fp8 four (fp32
# scales) or one (UE8M0) per 128 x 128.
WEIGHT_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1 + 4 / 128**2,
    "fp8-ue8m0": 1 + 1 / 128**2,
    "fp4": 1 / 2 + 1 / 32,
}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model's MoE layers.

    Attributes:
        num_layers: layers with experts.
        num_experts: routed experts of a layer.
        top_k: experts per token.
        hidden_size: model width.
        moe_intermediate_size: width of a routed expert.
        shared_width: width of all shared experts together; 0: none.
        expert_format, shared_format: keys of WEIGHT_BYTES.
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    shared_width: int
    expert_format: str
    shared_format: str

    @property
    def expert_numbers(self) -> int:
        """Weights of one routed expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def expert_bytes(self) -> float:
        return self.expert_numbers * WEIGHT_BYTES[self.expert_format]


def read_shape(path: Path) -> ModelShape:
    """The shape that a config.json, or the folder that holds one, describes.

    Raises:
        SettingsError: the file is missing or no JSON object.
        UnsupportedError: it has no DeepSeek MoE layers, or lacks one of their sizes.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SettingsError(f"--model {path} is no readable config.json: {error}.") from error
    if not isinstance(config, dict):
        raise SettingsError(f"--model {path} must hold a JSON object.")
    return shape_of(config.get("text_config", config))


def shape_of(config: dict[str, Any]) -> ModelShape:
    """As ``read_shape``, from the object itself.

    Raises:
        UnsupportedError: a size of its MoE layers is missing.
    """
    needed = ("n_routed_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    missing = [name for name in (*needed, "num_hidden_layers") if config.get(name) is None]
    if missing:
        raise UnsupportedError(
            f"The config has no {', '.join(missing)}: a plan needs a DeepSeek MoE model."
        )
    num_experts, top_k, hidden_size, width = (config[name] for name in needed)
    expert_format, shared_format = _formats(config)
    return ModelShape(
        num_layers=_num_moe_layers(config),
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        moe_intermediate_size=width,
        shared_width=width * (config.get("n_shared_experts") or 0),
        expert_format=expert_format,
        shared_format=shared_format,
    )


def _num_moe_layers(config: dict[str, Any]) -> int:
    """Layers from ``first_k_dense_replace`` on whose number ``moe_layer_freq`` divides."""
    first, step = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    return sum(layer % step == 0 for layer in range(first, config["num_hidden_layers"]))


def _formats(config: dict[str, Any]) -> tuple[str, str]:
    """Of the routed and of the shared experts."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        if name not in _DTYPES:
            raise UnsupportedError(f"Weights of dtype {name} are not known to the plan.")
        return _DTYPES[name], _DTYPES[name]
    method = quantisation.get("quant_method")
    if method != "fp8":
        raise UnsupportedError(f"Weights quantised by {method} are not known to the plan.")
    fp8 = "fp8-ue8m0" if quantisation.get("scale_fmt") == "ue8m0" else "fp8"
    # DeepSeek-V4's experts are FP4 unless its config says otherwise.
    default = "fp4" if config.get("model_type") == "deepseek_v4" else "fp8"
    return ("fp4" if config.get("expert_dtype", default) == "fp4" else fp8), fp8
