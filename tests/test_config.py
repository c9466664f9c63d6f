from typing import Any

import pytest

from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.errors import SettingsError

_SHAPE: dict[str, Any] = {
    "num_experts": 16,
    "top_k": 4,
    "hidden_size": 8,
    "moe_intermediate_size": 8,
    "max_num_tokens": 32,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 0}, "num_experts must be an integer of at least 1, found 0"),
        ({"hidden_size": 2.5}, "hidden_size .* found 2.5"),
        ({"max_num_tokens": True}, "max_num_tokens .* found True"),
        ({"top_k": 17}, "top_k is 17, but there are only 16"),
        ({"num_experts": 2**24}, "below 16777216"),
        ({"swiglu_limit": 0.0}, "swiglu_limit .* found 0.0"),
        ({"swiglu_limit": float("nan")}, "swiglu_limit .* found nan"),
    ],
)
def test_moe_config_refuses(change: dict[str, Any], text: str) -> None:
    MoEConfig(**_SHAPE)
    with pytest.raises(SettingsError, match=text):
        MoEConfig(**{**_SHAPE, **change})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"experts": "densest"}, "auto, static, dense, gated, grouped, ragged, found 'densest'"),
        ({"gather": "bf16"}, "bytes, fp32, found 'bf16'"),
        ({"max_gated_rows": -1}, "max_gated_rows .* found -1"),
        ({"experts": "ragged", "host_mode": False}, "needs host_mode"),
        ({"forced_gate": 2}, "None, 0 or 1, found 2"),
        ({"forced_gate": 1}, "no expert is gated with experts 'auto' in host_mode; choose gated"),
        ({"forced_gate": 0, "experts": "dense"}, "no expert is gated with experts 'dense'"),
        (
            {"forced_gate": 0, "host_mode": False, "max_gated_rows": 0},
            "no expert is gated with experts 'auto'; choose gated",
        ),
    ],
)
def test_ep_config_refuses(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        EPConfig(**fields)


def test_a_gate_may_be_forced_where_experts_are_gated() -> None:
    assert EPConfig(experts="gated", forced_gate=0).forced_gate == 0
    assert EPConfig(host_mode=False, forced_gate=1).forced_gate == 1
