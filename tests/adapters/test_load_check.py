"""Checkpoints with faults, loaded by vLLM in this process: each one is named, none is served."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.adapters.checkpoints import Change, Tensors, make_tensors, write
from vllm_moe_ep.adapters.vllm import cures
from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts
from vllm_moe_ep.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_rank")

FILE = "model.safetensors"
PREFIXES = {"v3": "model.layers.1.mlp.experts", "fp8": "model.layers.1.mlp.experts"}
PREFIXES["v4"] = "layers.1.ffn.experts"
DOWN = {"v3": "down_proj.weight", "fp8": "down_proj.weight", "v4": "w2.weight"}
GATE = {"v3": "gate_proj.weight", "fp8": "gate_proj.weight", "v4": "w1.weight"}
SCALE = {"fp8": "up_proj.weight_scale_inv", "v4": "w3.scale"}
KINDS = ("v3", "fp8", "v4")


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's worker for CPUs sets before it loads a model; and cures stay in their test."""
    monkeypatch.setattr(cures, "_active", set())
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda *args, **kwargs: None)


@cache
def _tensors(kind: str) -> tuple[dict[str, Any], Tensors]:
    return make_tensors(kind)


def make_config(folder: Path, **engine_args: Any) -> Any:
    arguments = {"moe_backend": "static-ep", "max_model_len": 128, "enforce_eager": True}
    arguments |= {"skip_tokenizer_init": True, **engine_args}
    return EngineArgs(model=str(folder), **arguments).create_engine_config()


def load(folder: Path, kind: str, **engine_args: Any) -> tuple[Any, Any]:
    """The model, loaded by vLLM's own loader, and its configuration."""
    dtype = "float32" if kind == "v3" else "bfloat16"
    config = make_config(folder, dtype=dtype, **engine_args)
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(config, config.model_config), config


def changed(folder: Path, kind: str, change: Change) -> Path:
    config, tensors = _tensors(kind)
    tensors = dict(tensors)
    change(tensors)
    write(folder, config, {FILE: tensors}, index=False)
    return folder


def refusal_of(folder: Path, kind: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, kind)
    return str(caught.value)


def layers_of(model: Any) -> list[StaticEPRoutedExperts]:
    return [part for part in model.modules() if isinstance(part, StaticEPRoutedExperts)]


@pytest.mark.parametrize("kind", KINDS)
def test_whole_checkpoint_is_loaded(tmp_path: Path, kind: str) -> None:
    model, _ = load(changed(tmp_path, kind, lambda tensors: None), kind)
    checks = [layer.load_check for layer in layers_of(model)]
    assert len(checks) >= 2
    assert all(check is not None and not check.is_loading for check in checks)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_matrices_of_all_layers_are_listed(tmp_path: Path, kind: str) -> None:
    last = PREFIXES[kind].replace(".1.", ".2.")
    names = [f"{PREFIXES[kind]}.3.{DOWN[kind]}", f"{last}.0.{GATE[kind]}"]

    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    text = refusal_of(changed(tmp_path, kind, change), kind)
    assert text.startswith(f"The checkpoint {tmp_path} lacks expert weights")
    assert f"random numbers: {', '.join(names)}. Complete it" in text


@pytest.mark.parametrize("kind", KINDS)
def test_missing_expert_is_listed(tmp_path: Path, kind: str) -> None:
    prefix = f"{PREFIXES[kind]}.5."
    gone = [name for name in _tensors(kind)[1] if name.startswith(prefix)]
    assert len(gone) == (3 if kind == "v3" else 6)

    def change(tensors: Tensors) -> None:
        for name in gone:
            del tensors[name]

    text = refusal_of(changed(tmp_path, kind, change), kind)
    assert all(name in text for name in gone)
    assert text.count(PREFIXES[kind]) == len(gone)


@pytest.mark.parametrize("kind", ["fp8", "v4"])
def test_missing_scale_is_named(tmp_path: Path, kind: str) -> None:
    name = f"{PREFIXES[kind]}.0.{SCALE[kind]}"
    text = refusal_of(changed(tmp_path, kind, lambda tensors: tensors.pop(name)), kind)
    assert f"random numbers: {name}." in text


@pytest.mark.parametrize("kind", ["fp8", "v4"])
def test_scale_that_is_no_number_is_named_with_its_file(tmp_path: Path, kind: str) -> None:
    name = f"{PREFIXES[kind]}.0.{SCALE[kind]}"

    def change(tensors: Tensors) -> None:
        scale = tensors[name].clone()
        if scale.dtype is torch.float32:
            scale[0, 0] = float("nan")
        else:
            scale.view(torch.uint8)[0, 0] = 255
        tensors[name] = scale

    text = refusal_of(changed(tmp_path, kind, change), kind)
    fault = "holds scales that are no finite number"
    assert text == f"{tmp_path / FILE} is damaged: {name} {fault}."


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [slice(None, -8), slice(None, 1)])
def test_wrong_shape_is_named_with_its_file(tmp_path: Path, kind: str, cut: slice) -> None:
    """vLLM would copy the first into a part of the parameter, and spread the second over it."""
    name = f"{PREFIXES[kind]}.2.{DOWN[kind]}"
    rows = _tensors(kind)[1][name].shape[0]

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][cut].contiguous()

    text = refusal_of(changed(tmp_path, kind, change), kind)
    assert text.startswith(f"{tmp_path / FILE} is damaged: {name} has shape [")
    assert f"wanted [{rows}, " in text


def test_matrix_that_is_in_two_files_is_named(tmp_path: Path) -> None:
    config, tensors = _tensors("v3")
    name = f"{PREFIXES['v3']}.2.{DOWN['v3']}"
    write(tmp_path, config, {FILE: tensors, "old.safetensors": {name: tensors[name]}}, index=False)
    text = refusal_of(tmp_path, "v3")
    assert f"more than once, so that it is unclear which of them count: {name}." in text


def test_dummy_weights_are_not_checked(tmp_path: Path) -> None:
    model, _ = load(changed(tmp_path, "v3", dict.clear), "v3", load_format="dummy")
    assert all(layer.load_check is None for layer in layers_of(model))


def reload(model: Any, config: Any, tensors: Tensors) -> None:
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, config.model_config)


@pytest.mark.parametrize("kind", ["v3", "fp8"])
def test_weights_that_replace_others_are_checked(tmp_path: Path, kind: str) -> None:
    model, config = load(changed(tmp_path, kind, lambda tensors: None), kind)
    tensors = dict(_tensors(kind)[1])
    for _ in range(2):
        reload(model, config, tensors)
    name = f"{PREFIXES[kind]}.3.{DOWN[kind]}"
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"random numbers: {name}."):
        reload(model, config, tensors)
    # Whoever goes on is told again, and not served.
    with pytest.raises(CheckpointError, match=name):
        layers_of(model)[0].build_layer()
