"""New weights for a model whose attention runs on AMX.

vLLM's `AMX_MLA` packs the weight of `kv_b_proj` and then frees it. When weights are loaded anew
they are copied into what was freed, which fails, whatever the model.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm_moe_ep.adapters.vllm import cures
from vllm_moe_ep.adapters.vllm.wrapping import MARK, argument


def with_freed_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hand freed parameters over to the new weights where the cure is on."""

    @functools.wraps(original)
    def _copy_and_restore_kernel_tensors(*args: Any, **kwargs: Any) -> Any:
        if cures.is_active(CURE):
            layer = argument(original, "layer", args, kwargs)
            _replace_freed(layer, argument(original, "info", args, kwargs))
        return original(*args, **kwargs)

    return _copy_and_restore_kernel_tensors


def _replace_freed(layer: Any, info: Any) -> None:
    """What was freed has no storage to keep: the attention packs it again afterwards."""
    parameters, _ = info.kernel_tensors
    for name, parameter in parameters.items():
        loaded = getattr(layer, name)
        if parameter.numel() == 0 and loaded.numel() > 0:
            parameters[name] = loaded


def is_needed(vllm_config: Any, model_config: Any) -> bool:
    """Whether this model's attention will free a weight."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return (
        model_config.use_mla
        and model_config.hf_text_config.model_type != "deepseek_v4"
        and torch.cpu._is_amx_tile_supported()
        and vllm_config.attention_config.backend is not AttentionBackendEnum.CPU_MLA
    )


def _failure() -> str | None:
    """Load a layer of which the weight was freed."""
    from vllm.model_executor.model_loader.reload import layerwise, types

    layer = torch.nn.Linear(3, 2, bias=False)
    loaded = layer.weight.detach().clone()
    info = types.LayerReloadingInfo(({}, {}), torch.device("cpu"))
    info.kernel_tensors = ({"weight": torch.nn.Parameter(torch.empty(0))}, {})
    _replace_freed(layer, info)
    getattr(layerwise._copy_and_restore_kernel_tensors, MARK)(layer, info)
    return None if torch.equal(layer.weight, loaded) else "the loaded numbers did not stay"


CURE = cures.Cure(
    name="reload under AMX attention",
    gap="vLLM's AMX attention frees weights that cannot be loaded anew then",
    remedy="Serve with --attention-backend CPU_MLA.",
    failure=_failure,
)
