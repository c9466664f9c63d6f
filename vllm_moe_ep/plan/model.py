"""The numbers of a model that its MoE layers' cost depends on, from its config.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_ep.cli.inputs import read_json_object
from vllm_moe_ep.errors import UnsupportedError

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
_NEEDED = (
    "n_routed_experts",
    "num_experts_per_tok",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
)
_LARGEST_SIZE = 2**20


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
        SettingsError: the file cannot be read or is no JSON object; names it.
        UnsupportedError: it has no DeepSeek MoE layers, or lacks one of their sizes; names it.
    """
    file = path / "config.json" if path.is_dir() else path
    config = read_json_object(file, "--model")
    named = f"--model {file}"
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise UnsupportedError(f"{named}: its text_config is no JSON object.")
    return shape_of(text_config, named)


def shape_of(config: dict[str, Any], named: str = "The config") -> ModelShape:
    """As ``read_shape``, from the object itself, which messages call `named`.

    Raises:
        UnsupportedError: a size of its MoE layers is missing, or is no size.
    """
    missing = [name for name in _NEEDED if config.get(name) is None]
    if missing:
        raise UnsupportedError(
            f"{named} has no {', '.join(missing)}: name the config of a DeepSeek MoE model."
        )
    num_experts, top_k, hidden_size, width, _ = (_size(config, name, 1, named) for name in _NEEDED)
    if top_k > num_experts:
        raise UnsupportedError(
            f"{named}: num_experts_per_tok is {top_k}, but there are {num_experts} experts."
        )
    expert_format, shared_format = _formats(config, named)
    return ModelShape(
        num_layers=_num_moe_layers(config, named),
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        moe_intermediate_size=width,
        shared_width=width * _size(config, "n_shared_experts", 0, named),
        expert_format=expert_format,
        shared_format=shared_format,
    )


def _size(config: dict[str, Any], name: str, least: int, named: str) -> int:
    """A size of the model; `least` where the config does not say or says null."""
    value = config.get(name)
    if value is None:
        return least
    if type(value) is not int or not least <= value <= _LARGEST_SIZE:
        raise UnsupportedError(
            f"{named}: {name} must be an integer from {least} to {_LARGEST_SIZE}, found "
            f"{_shortened(value)}."
        )
    return value


def _shortened(value: object) -> str:
    # An integer may have more digits than Python prints.
    text = f"{value:#x}" if isinstance(value, int) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _num_moe_layers(config: dict[str, Any], named: str) -> int:
    """Layers from ``first_k_dense_replace`` on whose number ``moe_layer_freq`` divides."""
    first = _size(config, "first_k_dense_replace", 0, named)
    step = _size(config, "moe_layer_freq", 1, named)
    return sum(layer % step == 0 for layer in range(first, config["num_hidden_layers"]))


def _formats(config: dict[str, Any], named: str) -> tuple[str, str]:
    """Of the routed and of the shared experts."""
    quantisation = config.get("quantization_config")
    if quantisation is None:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        if name not in _DTYPES:
            raise UnsupportedError(
                f"{named}: weights of dtype {_shortened(name)} are not known here, only "
                f"{', '.join(_DTYPES)}."
            )
        return _DTYPES[name], _DTYPES[name]
    if not isinstance(quantisation, dict):
        raise UnsupportedError(f"{named}: its quantization_config is no JSON object.")
    method = quantisation.get("quant_method")
    if method != "fp8":
        raise UnsupportedError(
            f"{named}: weights quantised by {_shortened(method)} are not known here, only by fp8."
        )
    fp8 = "fp8-ue8m0" if quantisation.get("scale_fmt") == "ue8m0" else "fp8"
    # DeepSeek-V4's experts are FP4 unless its config says otherwise.
    default = "fp4" if config.get("model_type") == "deepseek_v4" else "fp8"
    return ("fp4" if config.get("expert_dtype", default) == "fp4" else fp8), fp8
