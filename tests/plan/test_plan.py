"""The subcommand: what it reads from a config, prints and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_ep.cli.main import main
from vllm_moe_ep.plan.model import shape_of

V3: dict[str, Any] = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "quantization_config": {"quant_method": "fp8"},
}


def _plan(tmp_path: Path, config: object, *options: str) -> int:
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", str(tmp_path), "--platform", "trn2"]
    return main([*words, "--ep-size", "64", "--batch", "8", *options])


def test_shape_of_deepseek_v3() -> None:
    shape = shape_of(V3)
    assert (shape.num_layers, shape.shared_width) == (58, 2048)
    assert (shape.expert_format, shape.shared_format) == ("fp8", "fp8")
    assert shape.expert_numbers == 3 * 7168 * 2048


@pytest.mark.parametrize(
    ("changes", "formats"),
    [
        ({"quantization_config": None}, ("bf16", "bf16")),
        ({"quantization_config": None, "torch_dtype": "float32"}, ("fp32", "fp32")),
        (
            {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0"}},
            ("fp8-ue8m0", "fp8-ue8m0"),
        ),
        ({"expert_dtype": "fp4"}, ("fp4", "fp8")),
        ({"model_type": "deepseek_v4"}, ("fp4", "fp8")),
        ({"model_type": "deepseek_v4", "expert_dtype": "fp8"}, ("fp8", "fp8")),
    ],
)
def test_formats(changes: dict[str, Any], formats: tuple[str, str]) -> None:
    shape = shape_of({**V3, **changes})
    assert (shape.expert_format, shape.shared_format) == formats


@pytest.mark.parametrize(("first", "step", "expected"), [(0, 1, 10), (3, 1, 7), (1, 2, 4)])
def test_layers_with_experts(first: int, step: int, expected: int) -> None:
    layers = {"num_hidden_layers": 10, "first_k_dense_replace": first, "moe_layer_freq": step}
    assert shape_of({**V3, **layers}).num_layers == expected


def test_plan_of_64_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers worked out by hand: 4 of 256 experts a rank, 1 - (1 - 8/256)^8 of them hit."""
    assert _plan(tmp_path, V3) == 0
    printed = capsys.readouterr().out
    expert = 3 * 7168 * 2048 * (1 + 4 / 128**2)
    assert "4 per rank on 64 ranks" in printed
    assert f"weights {58 * (4 * expert + expert / 16) / 2**30:.2f} GiB" in printed
    assert "Experts hit by 8 rows: 22.4%" in printed
    assert "1 per layer, 0.000 MiB gathered and 0.219 MiB reduced" in printed
    assert f"{58 * 2.01:.1f} ms of latency per step" in printed
    assert "none known for this many" not in printed


def test_plan_of_sharded_tokens_on_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, V3, "--tokens", "sharded", "--ep-size", "2") == 0
    printed = capsys.readouterr().out
    assert "2 per layer" in printed and "does not fit" in printed
    assert "from figures for 64 ranks: none known for this many" in printed


def test_time_of_experts_is_that_of_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V3 at 8 rows is bound by HBM: bytes of one core over its 362.5 GB/s, by hand."""
    assert _plan(tmp_path, V3) == 0
    printed = capsys.readouterr().out
    blocks = 3 * 56 * 16
    # Codes; scales of fp32, read four times; routing weights of 8 rows on 128 partitions.
    expert = 3 * 7168 * 2048 // 2 + blocks // 2 * 4 * 4 + 128 * 8 * 4
    base = 8 * 7168 * (2 + 4) + 4 * 4
    hit = 4 * (1 - (1 - 8 / 256) ** 8)
    gated, dense = (58 * (base + number * expert) / 362_500 / 1e3 for number in (hit, 4))
    assert f"us per hit expert: hbm {expert / 362_500:.1f}, dma" in printed
    assert f"calls of 8 rows, {hit:.2f} hit experts a layer: {gated:.2f} ms, bound by" in printed
    experts = {line.split()[0]: line for line in printed.splitlines() if "; experts" in line}
    assert f"experts {gated:8.2f} ms" in experts["gated"]
    assert f"experts {dense:8.2f} ms" in experts["dense"]


def test_fp4_has_two_forms_and_bf16_no_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _plan(tmp_path, {**V3, "expert_dtype": "fp4"}) == 0
    printed = capsys.readouterr().out
    assert "FP4, unpacked on the chip: us per hit expert" in printed
    assert "bound by vector" in printed and "bound by hbm" in printed
    assert _plan(tmp_path, {**V3, "quantization_config": None}) == 0
    assert "none for bf16 experts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({**V3, "n_routed_experts": None}, (), "no n_routed_experts"),
        ([1], (), "JSON object"),
        ({**V3, "quantization_config": {"quant_method": "awq"}}, (), "quantised by 'awq'"),
        ({**V3, "quantization_config": None, "torch_dtype": "int8"}, (), "dtype 'int8'"),
        (V3, ("--batch", "0"), "--batch must be at least 1, found 0"),
        (V3, ("--ep-size", "-1"), "--ep-size must be at least 1, found -1"),
        (V3, ("--model", "/nowhere/config.json"), "/nowhere/config.json does not exist"),
    ],
)
def test_refusals(
    tmp_path: Path,
    config: object,
    options: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _plan(tmp_path, config, *options) == 2
    assert said in capsys.readouterr().err
