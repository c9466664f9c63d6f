"""The trained DeepSeek-V3 as an fp8 checkpoint: 128 x 128 blocks, as the published ones are.

An engine splits each matrix over tensor-parallel ranks in whole blocks, so a rank's part must be
a multiple of 128 wide. The small model has half of that at two ranks: its attention heads and
the columns of its shared experts are therefore held twice, and what reads them is halved. That
changes no output.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]

_DOUBLED_ROWS = ("q_b_proj", "kv_b_proj", "shared_experts.gate_proj", "shared_experts.up_proj")
_DOUBLED_COLUMNS = ("o_proj", "shared_experts.down_proj")


def fp8_config(config: dict[str, Any], quantisation: str) -> dict[str, Any]:
    """config.json of the quantised model, from that of the float one."""
    scale_fmt = {"scale_fmt": "ue8m0"} if quantisation == "fp8-ue8m0" else {}
    return {
        **config,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "num_attention_heads": 2 * config["num_attention_heads"],
        "num_key_value_heads": 2 * config["num_key_value_heads"],
        "n_shared_experts": 2 * config["n_shared_experts"],
        "quantization_config": quantization_config(**scale_fmt),
    }


def quantization_config(**extra: str) -> dict[str, Any]:
    """The entry of that name in config.json."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        **extra,
    }


def fp8_tensors(weights: Tensors, quantisation: str) -> Tensors:
    """The checkpoint's tensors; the scale of X.weight is X.weight_scale_inv, a multiplier.

    Args:
        weights: the float model's, any float dtype; rounded to bfloat16 before anything else.
        quantisation: "fp8" with fp32 scales, or "fp8-ue8m0".
    """
    import torch

    tensors: Tensors = {}
    for name, weight in weights.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = weight.to(torch.float32)
            continue
        weight = _doubled(name, weight.to(torch.bfloat16))
        if is_linear(name):
            tensors.update(fp8_linear(name, "weight_scale_inv", weight, quantisation))
        else:
            tensors[name] = weight
    return tensors


def fp8_linear(name: str, scale_suffix: str, weight: "torch.Tensor", quantisation: str) -> Tensors:
    """A matrix [n, k] and its scale [ceil(n / 128), ceil(k / 128)], fp32 or float8_e8m0fnu."""
    import torch

    from vllm_moe_ep.quant.cast import quantise
    from vllm_moe_ep.quant.formats import FP8_128X128, FP8_128X128_UE8M0

    fmt = FP8_128X128_UE8M0 if quantisation == "fp8-ue8m0" else FP8_128X128
    stored = quantise(weight, fmt)
    scale = stored.scale.view(torch.float8_e8m0fnu) if fmt.is_power_of_two else stored.scale
    return {name: stored.values, name.removesuffix("weight") + scale_suffix: scale}


def float_tensors(tensors: Tensors) -> Tensors:
    """What the quantised tensors stand for, in float32."""
    return dict(_floats(tensors))


def _floats(tensors: Tensors) -> Iterator[tuple[str, "torch.Tensor"]]:
    import torch

    from vllm_moe_ep.quant.cast import dequantise
    from vllm_moe_ep.quant.formats import FP8_128X128
    from vllm_moe_ep.quant.weight import Quantised

    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            yield name, dequantise(Quantised(tensor, scale, FP8_128X128.block_size))
        elif not name.endswith("_scale_inv"):
            yield name, tensor.to(torch.float32)


def is_linear(name: str) -> bool:
    """Whether this weight is a linear layer of the published models' fp8 part."""
    is_matrix = ".layers." in name and name.endswith("proj.weight")
    return is_matrix or name.endswith("kv_a_proj_with_mqa.weight")


def _doubled(name: str, weight: "torch.Tensor") -> "torch.Tensor":
    import torch

    if any(f".{part}." in name for part in _DOUBLED_ROWS):
        return torch.cat([weight, weight])
    if any(f".{part}." in name for part in _DOUBLED_COLUMNS):
        return torch.cat([weight, weight], dim=1) / 2
    return weight
