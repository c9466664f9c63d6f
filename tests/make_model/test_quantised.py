"""Quantised models: what their numbers say, the published layout, and their options."""

import json
from pathlib import Path

import pytest
import quant_oracle
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_moe_ep.cli.main import main
from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.make_model import MakeModelOptions, ModelReport, make_model
from vllm_moe_ep.make_model.architecture_v4 import v4_config
from vllm_moe_ep.make_model.quantised_v3 import fp8_tensors
from vllm_moe_ep.make_model.quantised_v4 import v4_tensors

E8M0 = torch.float8_e8m0fnu
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def weights(trained_report: ModelReport) -> dict[str, Tensor]:
    return load_file(trained_report.directory / "model.safetensors")


def test_fp8_model_predicts_as_the_float_one(trained_report: ModelReport, tmp_path: Path) -> None:
    """Heads and shared experts are held twice, which changes no output."""
    options = MakeModelOptions(
        tmp_path / "fp8",
        num_steps=2,
        num_threads=1,
        show_progress=False,
        weight_dtype="bfloat16",
        quantisation="fp8",
        source=trained_report.directory,
    )
    report = make_model(options)
    assert report.heldout_perplexity == pytest.approx(trained_report.heldout_perplexity, rel=0.02)
    assert report.num_parameters > trained_report.num_parameters
    assert make_model(options).reused
    config = json.loads((report.directory / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert (config["num_attention_heads"], config["n_shared_experts"]) == (8, 2)
    assert (report.directory / "heldout.txt").is_file()


@pytest.mark.parametrize(("quantisation", "dtype"), [("fp8", torch.float32), ("fp8-ue8m0", E8M0)])
def test_fp8_tensors(weights: dict[str, Tensor], quantisation: str, dtype: torch.dtype) -> None:
    tensors = fp8_tensors(weights, quantisation)
    quantised = {name for name, tensor in tensors.items() if tensor.dtype is FP8}
    assert {f"{name}_scale_inv" for name in quantised} == {
        name for name, tensor in tensors.items() if name.endswith("_scale_inv")
    }
    floats = ("norm", "gate", "embed_tokens", "lm_head")
    for name in tensors:
        if name.endswith(".weight"):
            assert (name in quantised) != name.split(".")[-2].endswith(floats), name
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert tensors[f"{name}_scale_inv"].dtype is dtype
    exact = quant_oracle.dequantise(tensors[name], tensors[f"{name}_scale_inv"], 128, 128)
    wanted = weights[name].bfloat16().double()
    assert 0 < (exact - wanted).norm() < 0.04 * wanted.norm()


def test_rank_parts_are_whole_blocks(weights: dict[str, Tensor]) -> None:
    """What two tensor-parallel ranks split has an even number of blocks along the split."""
    tensors = fp8_tensors(weights, "fp8")
    for part, dim in (
        ("self_attn.q_b_proj", 0),
        ("self_attn.kv_b_proj", 0),
        ("self_attn.o_proj", 1),
        ("mlp.shared_experts.gate_proj", 0),
        ("mlp.shared_experts.down_proj", 1),
    ):
        assert tensors[f"model.layers.1.{part}.weight"].shape[dim] % 256 == 0, part


def test_v4_has_the_published_layout(
    weights: dict[str, Tensor], trained_report: ModelReport
) -> None:
    v3 = json.loads((trained_report.directory / "config.json").read_text())
    tensors, config = v4_tensors(weights, v3, seed=0), v4_config(v3)
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    expected = {
        "layers.1.ffn.experts.63.w1.weight": (torch.int8, (256, 128)),
        "layers.1.ffn.experts.63.w1.scale": (E8M0, (256, 8)),
        "layers.2.ffn.experts.0.w2.scale": (E8M0, (256, 8)),
        "layers.0.ffn.shared_experts.w2.weight": (FP8, (256, 256)),
        "layers.0.ffn.shared_experts.w2.scale": (E8M0, (2, 2)),
        "layers.0.ffn.gate.tid2eid": (torch.int64, (2048, 6)),
        "layers.1.ffn.gate.bias": (torch.float32, (64,)),
        "layers.1.ffn.gate.weight": (torch.bfloat16, (64, 256)),
        "layers.1.attn.wq_b.weight": (FP8, (2048, 128)),
        "layers.1.attn.indexer.wq_b.scale": (E8M0, (64, 1)),
        "embed.weight": (torch.bfloat16, (2048, 256)),
    }
    assert expected.items() <= found.items()
    assert "layers.0.ffn.gate.bias" not in found and "layers.1.ffn.gate.tid2eid" not in found
    assert "layers.0.attn.compressor.ape" not in found
    assert config["expert_dtype"] == "fp4" and config["swiglu_limit"] == 0.05
    assert config["num_hidden_layers"] == len(config["compress_ratios"]) == 3


def test_v4_experts_are_different_pairs_of_trained_ones(
    weights: dict[str, Tensor], trained_report: ModelReport
) -> None:
    v3 = json.loads((trained_report.directory / "config.json").read_text())
    tensors = v4_tensors(weights, v3, seed=0)
    prefix = "layers.1.ffn.experts"
    gates = [tensors[f"{prefix}.{number}.w1.weight"] for number in range(64)]
    assert len({gate.numpy().tobytes() for gate in gates}) == 64
    stored, scale = (tensors[f"{prefix}.5.w3.{part}"] for part in ("weight", "scale"))
    exact = quant_oracle.dequantise(stored.view(torch.uint8), scale, 1, 32)
    trained = torch.cat(
        [weights[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"].double()
         for layer in (1, 2) for expert in range(16)]
    ).view(32, 128, 256)  # fmt: skip
    for half in exact.view(2, 128, 256):
        errors = (trained - half).norm(dim=(1, 2)) / trained.norm(dim=(1, 2))
        assert errors.min() < 0.15


def test_source_of_a_quantised_model() -> None:
    options = MakeModelOptions(Path("a/fp8"), weight_dtype="bfloat16", quantisation="fp8", seed=3)
    source = options.source_options
    assert source.directory == Path("a/fp8-float")
    assert (source.seed, source.weight_dtype, source.quantisation) == (3, "float32", None)
    assert options.recipe["quantisation"] == "fp8"
    assert "quantisation" not in source.recipe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantisation": "fp8"}, "bfloat16"),
        ({"quantisation": "int4", "weight_dtype": "bfloat16"}, "fp8, fp8-ue8m0, v4"),
        ({"source": Path("x")}, "only to quantise"),
    ],
)
def test_contradictions_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        MakeModelOptions(Path("model"), **changes)


def test_a_float_model_is_not_taken_for_a_quantised_one(trained_report: ModelReport) -> None:
    options = MakeModelOptions(
        trained_report.directory,
        num_steps=2,
        num_threads=1,
        weight_dtype="bfloat16",
        quantisation="v4",
    )
    with pytest.raises(SettingsError, match="weight_dtype is float32"):
        make_model(options)


def test_dtype_and_format_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["make-model", "x", "--dtype", "bfloat16", "--format", "fp8"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "weight_dtype", "quantisation"),
    [
        ([], "float32", None),
        (["--format", "bf16"], "bfloat16", None),
        (["--format", "fp8-ue8m0", "--source", "there"], "bfloat16", "fp8-ue8m0"),
    ],
)
def test_formats_on_the_command_line(
    words: list[str],
    weight_dtype: str,
    quantisation: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[MakeModelOptions] = []

    def no_model(options: MakeModelOptions) -> ModelReport:
        seen.append(options)
        return ModelReport(options.directory, False, 1, None, 1.0, 1.0, 1.0, "", 1.0)

    monkeypatch.setattr("vllm_moe_ep.make_model.cli.make_model", no_model)
    assert main(["make-model", "here", *words]) == 0
    assert (seen[0].weight_dtype, seen[0].quantisation) == (weight_dtype, quantisation)
    assert seen[0].source == (Path("there") if "--source" in words else None)
