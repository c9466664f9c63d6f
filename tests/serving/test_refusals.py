"""What cannot be served ends `vllm serve` with a message that says what to do."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vllm_moe_ep.demo.server import cpu_environment, free_port, vllm_program

pytestmark = pytest.mark.serving

STATIC_EP = ("--moe-backend", "static-ep")


def refusal_of(run: subprocess.CompletedProcess[str]) -> str:
    """The last line of a server that refused before it started anything."""
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr + run.stdout
    last = run.stderr.splitlines()[-1]
    assert last.startswith("vllm serve: ")
    return last


def serve_to_the_end(
    model: Path, flags: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to stop by itself; a hang fails the test."""
    return subprocess.run(
        [vllm_program(), "serve", str(model), "--port", str(free_port()), *flags],
        env={**os.environ, **cpu_environment(2), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_misspelt_backend_names_near_matches(model: Path) -> None:
    run = serve_to_the_end(model, ("--moe-backend", "static-pe"))
    assert run.returncode == 2
    assert "did you mean static_ep" in run.stderr
    assert "triton" in run.stderr, "the other backends are listed too"


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-dp", "2")])
def test_ranks_without_expert_parallelism(model: Path, flags: tuple[str, ...]) -> None:
    run = serve_to_the_end(model, (*STATIC_EP, *flags))
    assert "add --enable-expert-parallel" in refusal_of(run)


def test_plugin_filtered_out(model: Path) -> None:
    run = serve_to_the_end(model, STATIC_EP, VLLM_PLUGINS="lora_filesystem_resolver")
    assert run.returncode == 2
    assert "VLLM_PLUGINS='lora_filesystem_resolver'" in run.stderr
    assert "add static_ep to the list" in run.stderr


def test_unknown_setting_value(model: Path) -> None:
    run = serve_to_the_end(model, STATIC_EP, VLLM_MOE_EP_EXPERTS="fast")
    output = refusal_of(run)
    assert "VLLM_MOE_EP_EXPERTS='fast'" in output
    assert "dense, gated, grouped" in output


def test_unknown_setting_in_additional_config(model: Path) -> None:
    override = json.dumps({"moe_ep": {"expert_capacty": 4}})
    run = serve_to_the_end(model, (*STATIC_EP, "--additional-config", override))
    output = refusal_of(run)
    assert "expert_capacty" in output
    assert "expert_capacity" in output


def test_platform_without_a_layer(model: Path) -> None:
    run = serve_to_the_end(model, STATIC_EP, VLLM_MOE_EP_PLATFORM="neuron")
    assert "choose another --moe-backend" in refusal_of(run)


def test_model_without_deepseek_moe(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "dtype")
    llama = {key: config[key] for key in keep}
    llama |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(llama))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    run = serve_to_the_end(tmp_path, STATIC_EP)
    output = refusal_of(run)
    assert "LlamaForCausalLM has no DeepSeek MoE layer" in output
    assert "choose another --moe-backend" in output


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert f"The model {absent} does not exist" in refusal_of(serve_to_the_end(absent, STATIC_EP))


def test_file_that_is_cut_off(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is damaged" in refusal_of(serve_to_the_end(copy, STATIC_EP))


def test_missing_expert_weight_is_named_by_the_worker(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    tensors = load_file(copy / "model.safetensors")
    names = [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 15)]
    for name in names:
        del tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    run = serve_to_the_end(copy, (*STATIC_EP, "-tp", "2", "--enable-expert-parallel"))
    assert run.returncode == 1
    after = run.stderr.rpartition("vllm serve: ")[2]
    assert "Traceback" not in after
    assert f"The checkpoint {copy} lacks expert weights" in after
    # The second rank may have been ended before it said so.
    assert any(name in after for name in names)
