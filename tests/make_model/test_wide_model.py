"""A copy with other sizes: what is in its folder, and when it is made anew."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.make_model import ModelReport
from vllm_moe_ep.make_model.wide_model import make_wide_model

SIZES = {"moe_intermediate_size": 96, "n_routed_experts": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def source(random_report: ModelReport) -> Path:
    return random_report.directory


def test_sizes_weights_and_texts(source: Path, tmp_path: Path) -> None:
    directory = make_wide_model(source, tmp_path / "wide", SIZES)
    config = json.loads((directory / "config.json").read_text())
    assert config.items() >= SIZES.items()
    weights = {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    experts = [name for name in weights if ".experts." in name and "gate_proj" in name]
    assert len(experts) == SIZES["n_routed_experts"]
    assert {weights[name].shape[0] for name in experts} == {SIZES["moe_intermediate_size"]}
    router = weights["model.layers.1.mlp.gate.weight"].float()
    assert router.shape[0] == SIZES["n_routed_experts"] and router.std() > 0
    for name in ("tokenizer.json", "heldout.txt"):
        assert (directory / name).read_bytes() == (source / name).read_bytes()


def test_made_once(source: Path, tmp_path: Path) -> None:
    directory = make_wide_model(source, tmp_path / "wide", SIZES)
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert make_wide_model(source, directory, SIZES) == directory
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_another_model_in_its_place_is_kept(source: Path, tmp_path: Path) -> None:
    directory = make_wide_model(source, tmp_path / "wide", SIZES)
    with pytest.raises(SettingsError, match="wide"):
        make_wide_model(source, directory, {**SIZES, "n_routed_experts": 16})
