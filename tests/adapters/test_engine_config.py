"""Checks and adjustments of vLLM's configuration when static-ep is chosen."""

from typing import Any

import pytest

from tests.adapters.conftest import MIXTRAL, MakeConfig
from vllm_moe_ep.adapters.vllm.engine_config import ep_config_of, is_chosen, settings_of
from vllm_moe_ep.envs import load_settings
from vllm_moe_ep.errors import SettingsError, UnsupportedError

OURS = {"moe_backend": "static-ep"}


@pytest.mark.parametrize("spelling", ["static-ep", "static_ep", "STATIC-EP"])
def test_llm_argument_is_folded(make_config: MakeConfig, spelling: str) -> None:
    config = make_config(moe_backend=spelling)
    assert is_chosen(config)
    assert config.kernel_config.moe_backend == "static_ep"


def test_another_backend_is_left_alone(make_config: MakeConfig) -> None:
    config = make_config(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    assert not is_chosen(config)
    assert config.parallel_config.all2all_backend == "allgather_reducescatter"
    assert config.parallel_config.use_sequence_parallel_moe


def test_tokens_stay_replicated_over_tensor_parallel_ranks(make_config: MakeConfig) -> None:
    config = make_config(
        **OURS, tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True
    )
    assert not config.parallel_config.use_sequence_parallel_moe


def test_other_all2all_backend_is_overridden_with_a_warning(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    config = make_config(
        **OURS,
        data_parallel_size=2,
        enable_expert_parallel=True,
        all2all_backend="deepep_low_latency",
    )
    assert not config.parallel_config.use_sequence_parallel_moe
    assert "ignoring --all2all-backend deepep_low_latency" in caplog.text


@pytest.mark.parametrize(
    ("engine_args", "remedy"),
    [
        ({"tensor_parallel_size": 2}, "--enable-expert-parallel"),
        ({"data_parallel_size": 2}, "--enable-expert-parallel"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ({"enable_lora": True}, "--enable-lora"),
    ],
)
def test_what_cannot_run_is_refused_with_the_remedy(
    make_config: MakeConfig, engine_args: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        make_config(**OURS, **engine_args)


def test_model_without_deepseek_layers_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM"):
        make_config(MIXTRAL, **OURS)


def test_misspelt_llm_argument_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ValueError, match="did you mean static_ep"):
        make_config(moe_backend="staticep")


def test_platform_without_a_layer_is_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_PLATFORM", "neuron")
    with pytest.raises(UnsupportedError, match="another --moe-backend"):
        make_config(**OURS)


def test_additional_config_is_validated_at_start(make_config: MakeConfig) -> None:
    config = make_config(**OURS, additional_config={"moe_ep": {"experts": "dense"}})
    assert settings_of(config).experts == "dense"
    with pytest.raises(SettingsError, match="did you mean experts"):
        make_config(**OURS, additional_config={"moe_ep": {"expert": "dense"}})


def test_settings_are_not_read_when_another_backend_is_chosen(make_config: MakeConfig) -> None:
    config = make_config(additional_config={"moe_ep": {"nonsense": 1}})
    assert not is_chosen(config)


def test_layer_settings_reach_the_layer(make_config: MakeConfig) -> None:
    options = {"experts": "gated", "forced_gate": "1"}
    config = make_config(**OURS, additional_config={"moe_ep": options})
    ep_config = ep_config_of(settings_of(config))
    assert ep_config.forced_gate == 1
    assert ep_config_of(load_settings({}, environ={})).forced_gate is None


def test_a_gate_cannot_be_forced_where_no_expert_is_gated(make_config: MakeConfig) -> None:
    with pytest.raises(SettingsError, match="no expert is gated"):
        make_config(**OURS, additional_config={"moe_ep": {"forced_gate": "0"}})


@pytest.mark.parametrize(
    ("dtype", "has_amx", "chosen"),
    [
        ("float32", True, "CPU_MLA"),
        ("float16", True, "CPU_MLA"),
        ("bfloat16", True, None),
        ("float32", False, None),
    ],
)
def test_attention_that_knows_the_dtype(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    has_amx: bool,
    chosen: str | None,
) -> None:
    """vLLM takes AMX_MLA wherever there is AMX; it knows bfloat16 only."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    backend = make_config(**OURS, dtype=dtype).attention_config.backend
    assert (backend and backend.name) == chosen
    assert make_config(dtype=dtype).attention_config.backend is None
