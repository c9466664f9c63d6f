"""Which quantised experts are ours, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_moe_ep.adapters.vllm.expert_format import expert_format

PREFIX = "model.layers.1.mlp.experts"


def config_of(name: str, **changes: Any) -> Any:
    values = {
        "weight_block_size": [128, 128],
        "store_dtype": None,
        "online_quantization_config": None,
        "ignored_layers": [],
        "packed_modules_mapping": {},
        "expert_dtype": "fp4",
        "moe_quant_algo": "",
        **changes,
    }
    return SimpleNamespace(get_name=lambda: name, **values)


@pytest.mark.parametrize(
    ("quant_config", "kind"),
    [
        (None, "float"),
        (config_of("fp8"), "fp8"),
        (config_of("fp8", ignored_layers=[PREFIX]), "float"),
        (config_of("deepseek_v4_fp8"), "fp4"),
        (config_of("deepseek_v4_fp8", expert_dtype="fp8"), "fp8"),
    ],
)
def test_ours(quant_config: Any, kind: str) -> None:
    found = expert_format(quant_config, PREFIX, torch.bfloat16)
    assert (found.kind, found.refusal) == (kind, None)


@pytest.mark.parametrize(
    ("quant_config", "said"),
    [
        (config_of("fp8", weight_block_size=None), "one scale for a whole matrix"),
        (config_of("fp8", weight_block_size=[64, 128]), r"\[64, 128\]"),
        (config_of("fp8", store_dtype="mxfp4"), "mxfp4"),
        (config_of("fp8", online_quantization_config=object()), "while loading"),
        (config_of("deepseek_v4_fp8", moe_quant_algo="NVFP4"), "NVFP4"),
        (config_of("awq"), "awq"),
    ],
)
def test_refused(quant_config: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        refusal = expert_format(quant_config, PREFIX, torch.bfloat16).refusal
        assert refusal is None, refusal


def test_other_dtype_is_refused() -> None:
    assert "float64" in str(expert_format(None, PREFIX, torch.float64).refusal)
