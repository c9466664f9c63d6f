"""Attention of DeepSeek-V2 and V3 on a CPU with AMX, for models that are not in bfloat16."""

import logging
from typing import Any

import torch

logger = logging.getLogger("vllm.vllm_moe_ep")


def avoid_amx_attention(vllm_config: Any) -> None:
    """Choose vLLM's MLA backend of every dtype where its bf16-only one would be taken.

    On a CPU with AMX vLLM 0.32 and 0.33 take `AMX_MLA` whatever the dtype. In float32 it fails
    while weights are loaded, in float16 at the first step.
    """
    model_config = vllm_config.model_config
    if model_config is None or not model_config.use_mla:
        return
    if model_config.dtype is torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if vllm_config.attention_config.backend is AttentionBackendEnum.CPU_MLA:
        return
    vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
    logger.info(
        "static-ep: attention runs on CPU_MLA: vLLM's AMX_MLA, its choice on this CPU, computes in "
        "bfloat16 only, and this model is in %s.",
        str(model_config.dtype).removeprefix("torch."),
    )
