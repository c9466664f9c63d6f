"""DeepSeek's real MoE class on the CUDA layer, with the GPU's kernels replaced by loops on CPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import rel_l2
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from tests.adapters.conftest import DEEPSEEK_V3, MakeConfig
from tests.adapters.test_moe_factory import LAYER, build, expected_output, experts_of
from tests.deepgemm.fake_psum_kernels import fake_psum_bundle
from vllm_moe_ep.adapters.vllm import cuda_experts, cuda_method, cuda_warmup
from vllm_moe_ep.adapters.vllm.cuda_warmup import warmup_rows
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.quant.cast import dequantise, quantise
from vllm_moe_ep.quant.formats import FP8_128X128

pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = {**DEEPSEEK_V3, "moe_intermediate_size": 128, "torch_dtype": "bfloat16"}
SHARED = [f"{LAYER}.shared_experts.{name}_proj" for name in ("gate_up", "gate", "up", "down")]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The features that the layer loads, in order."""
    loaded: list[str] = []

    def deep_gemm(feature: str) -> Any:
        loaded.append(feature)
        return fake_psum_bundle()[0]

    monkeypatch.setenv("VLLM_MOE_EP_CUDA_PATH", "deepgemm")
    monkeypatch.setattr(cuda_method, "is_chosen", lambda settings: True)
    monkeypatch.setattr(cuda_method, "deep_gemm", deep_gemm)
    monkeypatch.setattr(cuda_experts, "deep_gemm", deep_gemm)
    monkeypatch.setattr(
        cuda_experts, "load_row_kernels", lambda package: load_row_kernels("reference")
    )
    monkeypatch.setattr(cuda_warmup, "kernel_cache", lambda: str(tmp_path))
    monkeypatch.setattr(cuda_warmup, "_warmed", set())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return loaded


def config_of(make_config: MakeConfig) -> Any:
    config = make_config(MODEL, moe_backend="static-ep", dtype="bfloat16")
    config.load_config.load_format = "auto"
    config.scheduler_config.max_num_batched_tokens = 64
    return config


def build_bf16(config: Any, **changes: Any) -> Any:
    """As the model loader does: parameters take torch's default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build(config, **changes)
    finally:
        torch.set_default_dtype(torch.float32)


def run(config: Any, moe: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    with set_current_vllm_config(config):
        process_weights_after_loading(moe, config.model_config, torch.device("cpu"))
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=9):
        return moe(hidden_states.clone())


def randomise(moe: Any, has_fp8_experts: bool = False) -> None:
    # No checkpoint file is read.
    experts_of(moe).load_check = None
    for name, parameter in moe.named_parameters():
        if has_fp8_experts and ".routed_experts." in f".{name}":
            continue
        values = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
        parameter.data = values.to(parameter.dtype)


def test_bf16_layer_equals_the_oracle(make_config: MakeConfig, fake_cuda: list[str]) -> None:
    config = config_of(make_config)
    moe = build_bf16(config).to(torch.bfloat16)
    moe.gate.e_score_correction_bias.data = moe.gate.e_score_correction_bias.data.float()
    randomise(moe)
    # Loaded with the model, before any weight.
    assert fake_cuda == ["bf16"]
    hidden_states = torch.randn(9, 128).bfloat16()
    expected = expected_output(moe, hidden_states, config.model_config.hf_config)
    weights = experts_of(moe).w13_weight.data_ptr()
    assert rel_l2(run(config, moe, hidden_states), expected) <= 2e-2
    assert experts_of(moe).w13_weight.data_ptr() == weights


def test_fp8_layer_equals_the_oracle(make_config: MakeConfig, fake_cuda: list[str]) -> None:
    config = config_of(make_config)
    quant_config = Fp8Config(True, "dynamic", ignored_layers=SHARED, weight_block_size=[128, 128])
    moe = build_bf16(config, quant_config=quant_config)
    experts = experts_of(moe)
    assert fake_cuda == ["fp8_block"]
    stored = {}
    for name in ("w13_weight", "w2_weight"):
        parameter = getattr(experts, name)
        parameter.data = parameter.data.to(torch.float8_e4m3fn)
        scale = getattr(experts, f"{name}_scale_inv")
        assert parameter.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        weight = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5
        stored[name] = quantise(weight, FP8_128X128)
        parameter.data = dequantise(stored[name])
        scale.data = stored[name].scale
    bias = moe.gate.e_score_correction_bias
    for module in (moe.gate, moe.shared_experts):
        module.to(torch.bfloat16)
    bias.data = bias.data.float()
    randomise(moe, has_fp8_experts=True)
    hidden_states = torch.randn(9, 128).bfloat16()
    expected = expected_output(moe, hidden_states, config.model_config.hf_config)
    for name, quantised in stored.items():
        getattr(experts, name).data = quantised.values
    assert rel_l2(run(config, moe, hidden_states), expected) <= 0.05


@pytest.mark.parametrize(
    ("quant_config", "dtype", "said"),
    [
        (None, torch.bfloat16, None),
        (None, torch.float16, "float16"),
        (Fp8Config(True, "dynamic", weight_block_size=[128, 128]), torch.bfloat16, None),
        (Fp8Config(True, "dynamic", weight_block_size=[64, 128]), torch.bfloat16, "64, 128"),
        (Fp8Config(True, "static"), torch.bfloat16, "per tensor"),
        (Fp8Config(True, "static", ignored_layers=["a.experts"]), torch.bfloat16, None),
    ],
)
def test_formats(quant_config: Any, dtype: torch.dtype, said: str | None) -> None:
    reason = cuda_method.format_refusal(quant_config, dtype, "a.experts")
    assert (reason is None) == (said is None)
    assert said is None or said in str(reason)


@pytest.mark.parametrize(("path", "limit"), [("auto", 7.0), ("engine", 7.0), ("engine", None)])
def test_the_engine_s_kernel_gets_no_layer_with_a_clamp(
    fake_cuda: list[str], path: str, limit: float | None
) -> None:
    settings = SimpleNamespace(cuda_path=path)
    layer = SimpleNamespace(settings=settings, swiglu_limit=limit, layer_name="model.layers.3")
    weights = HopperWeights(torch.empty(1, 256, 128), torch.empty(1, 128, 128))
    if path == "engine" and limit is not None:
        with pytest.raises(UnsupportedError, match="model.layers.3 clamps .* at 7.0"):
            cuda_experts.entries_for(layer, weights)
        return
    paths = {entry.path for entry in cuda_experts.entries_for(layer, weights)}
    assert paths == {"engine" if limit is None else "deepgemm"}


@pytest.mark.parametrize("path", ["engine", "deepgemm"])
def test_a_setting_chooses_the_kernels(fake_cuda: list[str], path: str) -> None:
    layer = SimpleNamespace(
        settings=SimpleNamespace(cuda_path=path), swiglu_limit=None, layer_name="model.layers.3"
    )
    weights = HopperWeights(torch.empty(1, 256, 128), torch.empty(1, 128, 128))
    assert {entry.path for entry in cuda_experts.entries_for(layer, weights)} == {path}


def test_a_setting_bounds_the_rows_of_a_pass(
    fake_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(cuda_experts, "HopperExperts", lambda *args: given.append(args[-1]))
    layer = SimpleNamespace(
        settings=SimpleNamespace(cuda_pass_rows=1234), swiglu_limit=None, _expert_map=None
    )
    weights = HopperWeights(torch.empty(1, 256, 128), torch.empty(1, 128, 128))
    cuda_experts._deepgemm_experts(layer, weights)
    assert given == [1234]


def test_settings_of_the_cpu_layer_are_refused(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_moe_ep.adapters.vllm import engine_config
    from vllm_moe_ep.hardware import Hardware

    hopper = Hardware("cuda", "H200", (9, 0), "the layer", "a test")
    monkeypatch.setattr(engine_config, "probe", lambda platform: hopper)
    checked = []
    monkeypatch.setattr(engine_config, "check_deep_gemm", lambda: checked.append(1))
    make_config(MODEL, moe_backend="static-ep", dtype="bfloat16")
    assert checked
    monkeypatch.setenv("VLLM_MOE_EP_EXPERTS", "dense")
    with pytest.raises(UnsupportedError, match="EXPERTS=dense is for CPU"):
        make_config(MODEL, moe_backend="static-ep", dtype="bfloat16")


def test_warm_up_covers_captured_sizes_and_both_sides_of_each_boundary() -> None:
    sizes = warmup_rows([1, 3, 200], 100, 2, [97, 1000])
    assert sizes == [1 * 2, 2 * 2, 3 * 2, 4 * 2, 16, 32, 64, 96, 97, 128, 200]
