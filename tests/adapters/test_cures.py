"""Ways around gaps of vLLM's CPU platform: only for static-ep, only after their tests pass."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

from tests.adapters.conftest import DEEPSEEK_V3, MakeConfig
from tests.adapters.quantised_models import FP8_V3, V4
from vllm_moe_ep.adapters.vllm import (
    cpu_attention,
    cure_amx_reload,
    cure_fp8_linear,
    cure_v4_metadata,
    cure_v4_schedule,
    cures,
    needed_cures,
)
from vllm_moe_ep.errors import UnsupportedError

MODULES = (cure_fp8_linear, cure_v4_schedule, cure_v4_metadata)
OURS = {"moe_backend": "static-ep", "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """No cure is on, whatever ran before in this process."""
    switched_on: set[str] = set()
    monkeypatch.setattr(cures, "_active", switched_on)
    return switched_on


@pytest.fixture(autouse=True)
def _without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (DEEPSEEK_V3, []),
        (FP8_V3, ["fp8 linear layers"]),
        (V4, ["fp8 linear layers", "DeepSeek-V4 schedules", "DeepSeek-V4 metadata"]),
    ],
)
def test_a_model_gets_what_it_needs(
    make_config: MakeConfig, active: set[str], model: dict[str, Any], names: list[str]
) -> None:
    config = make_config(model, **OURS)
    needed_cures.prepare_for(config, config.model_config)
    assert active == set(names)


def test_nothing_is_switched_on_off_the_cpu(
    make_config: MakeConfig, active: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(V4, **OURS)
    platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    needed_cures.prepare_for(config, config.model_config)
    assert not active


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_cure_that_fails_its_test_ends_the_start(
    module: Any, make_config: MakeConfig, active: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cures.Cure(module.CURE.name, module.CURE.gap, module.CURE.remedy, lambda: "off by 1")
    monkeypatch.setattr(module, "CURE", broken)
    config = make_config(V4, **OURS)
    with pytest.raises(UnsupportedError) as caught:
        needed_cures.prepare_for(config, config.model_config)
    for part in (broken.gap, "off by 1", broken.remedy):
        assert part in str(caught.value)
    assert broken.name not in active


def test_the_log_names_a_cure_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO)
    tested = []
    cure = cures.Cure("one", "this is missing", "Do that.", lambda: tested.append(1))
    cures.switch_on(cure)
    cures.switch_on(cure)
    assert len(tested) == 1
    # One record may reach the capture through two loggers.
    assert len({r for r in caplog.records if "this is missing" in r.getMessage()}) == 1


def test_fp8_kernel_is_lent_to_static_ep_alone(make_config: MakeConfig, active: set[str]) -> None:
    assert not CPUFp8BlockScaledMMKernel.is_supported()[0]
    active.add(cure_fp8_linear.CURE.name)
    assert not CPUFp8BlockScaledMMKernel.is_supported()[0]
    with set_current_vllm_config(make_config(FP8_V3, dtype="bfloat16")):
        assert not CPUFp8BlockScaledMMKernel.is_supported()[0]
    with set_current_vllm_config(make_config(FP8_V3, **OURS)):
        assert CPUFp8BlockScaledMMKernel.is_supported() == (True, None)


def test_fp8_products_that_are_wrong_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cure_fp8_linear._product

    def one_block_wrong(rows: Any, values: Any, scale: Any, is_packed: bool) -> Any:
        wrong = scale.clone()
        wrong[1, 2] *= 2
        return right(rows, values, wrong, is_packed)

    assert cure_fp8_linear.CURE.failure() is None
    monkeypatch.setattr(cure_fp8_linear, "_product", one_block_wrong)
    assert "off by" in str(cure_fp8_linear.CURE.failure())
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert "AVX512" in str(cure_fp8_linear.CURE.failure())


def test_schedules_are_completed_for_static_ep_alone(
    make_config: MakeConfig, active: set[str]
) -> None:
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder

    def keys(config: Any) -> set[str]:
        builder = SimpleNamespace(vllm_config=config)
        return set(DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler(builder, 1))

    ours, stock = make_config(V4, **OURS), make_config(V4, dtype="bfloat16")
    assert "c1a" not in keys(ours)
    active.add(cure_v4_schedule.CURE.name)
    assert {"c1a", "c2a", "c4a", "c128a", "swaonly"} <= keys(ours)
    assert "c1a" not in keys(stock)


def test_changed_or_wrong_metadata_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_ep.adapters.vllm import v4_metadata

    assert cure_v4_metadata.CURE.failure() is None
    with monkeypatch.context() as patch:
        patch.setattr(v4_metadata, "window_slots", lambda swa_indices, other: None)
        assert "now takes" in str(cure_v4_metadata.CURE.failure())
    wrong = v4_metadata.compressed_slots

    def shifted(compressed_slot_mapping: Any, *rest: Any) -> None:
        wrong(compressed_slot_mapping, *rest)
        compressed_slot_mapping += 1

    monkeypatch.setattr(cure_v4_metadata, "_changed_signature", lambda: None)
    monkeypatch.setattr(v4_metadata, "compressed_slots", shifted)
    assert "instead of" in str(cure_v4_metadata.CURE.failure())


@pytest.mark.parametrize(
    ("model", "flags", "is_needed"),
    [
        (DEEPSEEK_V3, {}, True),
        (DEEPSEEK_V3, {"dtype": "float32"}, False),
        (DEEPSEEK_V3, {"attention_backend": "CPU_MLA"}, False),
        (V4, {}, False),
    ],
)
def test_amx_attention_needs_its_cure(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    flags: dict[str, Any],
    is_needed: bool,
) -> None:
    config = make_config(model, **OURS | flags)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if flags.get("dtype") == "float32":
        cpu_attention.avoid_amx_attention(config)
    assert cure_amx_reload.is_needed(config, config.model_config) is is_needed


def test_freed_weights_are_loaded_anew(active: set[str]) -> None:
    from vllm.model_executor.model_loader.reload import layerwise, types

    def load() -> tuple[Any, torch.Tensor]:
        layer = torch.nn.Linear(4, 3)
        info = types.LayerReloadingInfo(({}, {}), torch.device("cpu"))
        kept = torch.nn.Parameter(torch.full((3,), torch.nan))
        info.kernel_tensors = ({"weight": torch.nn.Parameter(torch.empty(0)), "bias": kept}, {})
        loaded = layer.weight.detach().clone(), layer.bias.detach().clone()
        layerwise._copy_and_restore_kernel_tensors(layer, info)
        assert layer.bias is kept and torch.equal(kept, loaded[1])
        return layer.weight, loaded[0]

    with pytest.raises(RuntimeError, match="size of tensor"):
        load()
    active.add(cure_amx_reload.CURE.name)
    assert torch.equal(*load())
    assert cure_amx_reload.CURE.failure() is None
