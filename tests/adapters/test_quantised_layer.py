"""vLLM's real MoE classes with quantised weights, built and run in this process, on our experts."""

from typing import Any

import pytest
import quant_oracle
import torch
from oracle import expert, rel_l2, routed_experts
from quantised_factory import exact_halves, random_halves, random_matrix
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tests.adapters.conftest import MakeConfig
from tests.adapters.quantised_models import FP8_V3, V4
from vllm_moe_ep.adapters.vllm.needed_cures import prepare_for
from vllm_moe_ep.adapters.vllm.routed_experts import StaticEPRoutedExperts
from vllm_moe_ep.quant.formats import FP4_1X32, FP8_128X128, QuantFormat
from vllm_moe_ep.quant.weight import Quantised

pytestmark = pytest.mark.usefixtures("one_rank")

OURS = {"moe_backend": "static-ep", "dtype": "bfloat16"}
MAX_ERROR = 1e-2


def build_v3(config: Any) -> Any:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE

    prepare_for(config, config.model_config)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return DeepseekV2MoE(
            config=config.model_config.hf_config,
            parallel_config=config.parallel_config,
            quant_config=config.quant_config,
            prefix="model.layers.1.mlp",
        )


def build_v4(config: Any, layer: int) -> Any:
    prepare_for(config, config.model_config)
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4MoE

    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        return DeepseekV4MoE(config, prefix=f"model.layers.{layer}.ffn")


def experts_of(moe: Any) -> StaticEPRoutedExperts:
    return next(part for part in moe.modules() if isinstance(part, StaticEPRoutedExperts))


def fill_experts(experts: Any, fmt: QuantFormat, suffix: str) -> tuple[Tensor, Tensor]:
    """Random codes and scales into the parameters; their exact numbers, w13 and w2 in fp64."""
    lead, width = (experts.local_num_experts,), experts.intermediate_size_per_partition
    w13 = random_halves(fmt, lead, width, experts.hidden_size)
    w2 = random_matrix(fmt, lead, experts.hidden_size, width)
    for name, matrix in (("w13", w13), ("w2", w2)):
        getattr(experts, f"{name}_weight").data.copy_(matrix.values)
        getattr(experts, f"{name}_weight_{suffix}").data.copy_(matrix.scale)
    exact_w2 = quant_oracle.dequantise(w2.values, w2.scale, *fmt.block_size)
    return exact_halves(w13, fmt, width), exact_w2


def fill_linear(linear: Any) -> Tensor:
    """Random fp8 codes and scales into a linear layer; its exact numbers in fp64."""
    stored = random_matrix(FP8_128X128, (), *linear.weight.shape)
    linear.weight.data.copy_(stored.values)
    # Powers of two, which UE8M0 holds as well.
    scale = torch.exp2(torch.log2(stored.scale).round())
    linear.weight_scale_inv.data.copy_(scale)
    return quant_oracle.dequantise(stored.values, scale, 128, 128)


def run_experts(experts: Any, config: Any, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=len(rows)):
        return experts.compute(rows, weights, ids, get_forward_context())


def routing(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    scores, ids = torch.rand(num_tokens, num_experts).topk(top_k, dim=1)
    return ids.to(torch.int32), scores / scores.sum(dim=1, keepdim=True)


def bytes_held(experts: Any) -> int:
    """Of all tensors of the module and of its layer, each storage once."""
    tensors = [*experts.parameters(), *experts.buffers()]
    linears = experts.ep_layer.experts.shard.linears if experts.ep_layer else None
    for value in vars(linears).values() if linears else ():
        tensors += [value] if isinstance(value, Tensor) else []
        tensors += [value.values, value.scale] if isinstance(value, Quantised) else []
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_fp8_experts_of_v3(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_EXPERTS", strategy)
    config = make_config(FP8_V3, **OURS)
    moe = build_v3(config)
    experts = experts_of(moe)
    exact = fill_experts(experts, FP8_128X128, "scale_inv")
    raw, num_bytes = experts.w13_weight.data_ptr(), bytes_held(experts)
    with set_current_vllm_config(config):
        process_weights_after_loading(experts, config.model_config, torch.device("cpu"))
    assert bytes_held(experts) == num_bytes, "a copy is held"
    assert (experts.w13_weight.data_ptr() == raw) == (strategy == "dense")
    for num_tokens in (1, 33):
        rows = torch.randn(num_tokens, 256).bfloat16()
        ids, weights = routing(num_tokens, 8, 2)
        actual = run_experts(experts, config, rows, ids, weights)
        assert rel_l2(actual, routed_experts(rows, ids, weights, *exact)) <= MAX_ERROR


def load_new_experts(experts: Any) -> tuple[Tensor, Tensor]:
    """Through the weight loaders, as a checkpoint's tensors; the exact numbers in fp64."""
    num_experts, width = experts.local_num_experts, experts.intermediate_size_per_partition
    sizes = {"w1": (width, 256), "w3": (width, 256), "w2": (256, width)}
    exact: dict[str, list[Tensor]] = {shard: [] for shard in sizes}
    for shard, shape in sizes.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        for number in range(num_experts):
            stored = random_matrix(FP8_128X128, (), *shape)
            for suffix, tensor in (("", stored.values), ("_scale_inv", stored.scale)):
                parameter = getattr(experts, name + suffix)
                parameter.weight_loader(
                    parameter, tensor, f"experts.{name}{suffix}", shard_id=shard, expert_id=number
                )
            exact[shard].append(quant_oracle.dequantise(stored.values, stored.scale, 128, 128))
    gate, up, down = (torch.stack(exact[shard]) for shard in ("w1", "w3", "w2"))
    return torch.cat([gate, up], dim=1), down


@pytest.mark.parametrize("strategy", ["auto", "dense"])
def test_reloaded_weights_are_used(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_EXPERTS", strategy)
    config = make_config(FP8_V3, **OURS)
    experts = experts_of(build_v3(config))
    record_metadata_for_reloading(experts)
    fill_experts(experts, FP8_128X128, "scale_inv")
    rows = torch.randn(9, 256).bfloat16()
    ids, weights = routing(9, 8, 2)
    with set_current_vllm_config(config):
        process_weights_after_loading(experts, config.model_config, torch.device("cpu"))
        first_pointer = experts.w13_weight.data_ptr()
        initialize_layerwise_reload(experts)
        exact = load_new_experts(experts)
        finalize_layerwise_reload(experts, config.model_config)
    assert experts.w13_weight.data_ptr() == first_pointer
    actual = run_experts(experts, config, rows, ids, weights)
    assert rel_l2(actual, routed_experts(rows, ids, weights, *exact)) <= MAX_ERROR
    assert bytes_held(experts) == sum(parameter.nbytes for parameter in experts.parameters())
    if strategy == "auto":
        return
    # In place, as updates in the engine's own format come, which here is the checkpoint's.
    exact = fill_experts(experts, FP8_128X128, "scale_inv")
    actual = run_experts(experts, config, rows, ids, weights)
    assert rel_l2(actual, routed_experts(rows, ids, weights, *exact)) <= MAX_ERROR


def v4_scores(moe: Any, rows: Tensor) -> Tensor:
    logits = rows.double() @ moe.gate.weight.double().T
    return torch.log1p(logits.exp()).sqrt()


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "biased"])
def test_layer_of_v4(make_config: MakeConfig, layer: int, expert_dtype: str) -> None:
    """Hash table or biased choice, FP4 or fp8 experts, the clamp on routed and shared ones."""
    config = make_config({**V4, "expert_dtype": expert_dtype}, **OURS)
    moe = build_v4(config, layer)
    experts, shared = experts_of(moe), moe.shared_experts
    kind = (FP4_1X32, "scale") if expert_dtype == "fp4" else (FP8_128X128, "scale_inv")
    exact = fill_experts(experts, *kind)
    shared_w13, shared_w2 = fill_linear(shared.gate_up_proj), fill_linear(shared.down_proj)
    moe.gate.weight.data = torch.randn(moe.gate.weight.shape).bfloat16() / 16
    rows, token_ids = torch.randn(17, 256).bfloat16(), torch.randint(128, (17,))
    scores = v4_scores(moe, rows)
    if layer == 0:
        table = torch.stack([torch.randperm(64)[:6] for _ in range(128)])
        moe.gate.tid2eid.data.copy_(table)
        ids = table[token_ids]
    else:
        moe.gate.e_score_correction_bias.data = torch.randn(64)
        ids = (scores + moe.gate.e_score_correction_bias.double()).topk(6, dim=1).indices
    weights = scores.gather(1, ids)
    weights = 1.5 * weights / weights.sum(dim=1, keepdim=True)
    limit = V4["swiglu_limit"]
    expected = routed_experts(rows, ids, weights, *exact, limit)
    assert rel_l2(routed_experts(rows, ids, weights, *exact), expected) > 0.5, "it hardly clamps"
    expected += torch.stack([expert(row, shared_w13, shared_w2, limit) for row in rows])
    with set_current_vllm_config(config):
        process_weights_after_loading(moe, config.model_config, torch.device("cpu"))
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=17):
        actual = moe(rows.clone(), token_ids)
    assert rel_l2(actual, expected) <= MAX_ERROR
