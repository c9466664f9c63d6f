"""In which format a layer's expert weights come, read off vLLM's quantisation config."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WORKS = "bf16, fp16, fp32, fp8 in 128 x 128 blocks and DeepSeek-V4's FP4 work"


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """What a layer's experts are.

    Attributes:
        kind: "float", "fp8" (e4m3, 128 x 128 blocks) or "fp4" (e2m1, 1 x 32 blocks).
        refusal: why experts of this format cannot be ours; None if they can.
    """

    kind: Literal["float", "fp8", "fp4"]
    refusal: str | None = None


def expert_format(quant_config: Any, prefix: str, params_dtype: torch.dtype) -> ExpertFormat:
    """Format of the experts of the layer named `prefix`.

    Args:
        quant_config: vLLM's config of the checkpoint's quantisation, None without one.
        params_dtype: of weights that are not quantised.
    """
    if quant_config is None or _is_skipped(quant_config, prefix):
        return _float(params_dtype)
    name = quant_config.get_name()
    if quant_config.online_quantization_config is not None:
        return ExpertFormat("float", f"they are quantised while loading; {_WORKS}")
    if name == "deepseek_v4_fp8" and quant_config.expert_dtype == "fp4":
        algorithm = quant_config.moe_quant_algo
        refusal = f"its experts are {algorithm}; {_WORKS}" if algorithm else None
        return ExpertFormat("fp4", refusal)
    if name in ("fp8", "deepseek_v4_fp8"):
        return ExpertFormat("fp8", _fp8_refusal(quant_config))
    return ExpertFormat("float", f"its experts are quantised ({name}); {_WORKS}")


def _float(params_dtype: torch.dtype) -> ExpertFormat:
    if params_dtype in _DTYPES:
        return ExpertFormat("float")
    return ExpertFormat("float", f"its experts are {params_dtype}; {_WORKS}")


def _is_skipped(quant_config: Any, prefix: str) -> bool:
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    ignored_layers = getattr(quant_config, "ignored_layers", None)
    if not ignored_layers:
        return False
    return is_layer_skipped(prefix, ignored_layers, quant_config.packed_modules_mapping)


def _fp8_refusal(quant_config: Any) -> str | None:
    if quant_config.store_dtype is not None:
        return f"its experts are stored as {quant_config.store_dtype} in fp8's place; {_WORKS}"
    if quant_config.weight_block_size == [128, 128]:
        return None
    found = quant_config.weight_block_size or "one scale for a whole matrix"
    return f"its experts are fp8 with {found}; {_WORKS}"
