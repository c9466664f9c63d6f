"""DeepSeek's real MoE class of vLLM, built and run in this process, with and without us."""

from typing import Any

import pytest
import torch
from oracle import expert
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from tests.adapters.conftest import MakeConfig
from vllm_moe_ep.adapters.vllm.load_report import report
from vllm_moe_ep.adapters.vllm.moe_factory import refusal
from vllm_moe_ep.errors import UnsupportedError

LAYER = "model.layers.1.mlp"

pytestmark = pytest.mark.usefixtures("one_rank")


def build(config: Any, **changes: Any) -> Any:
    from vllm.model_executor.models import deepseek_v2

    hf_config = config.model_config.hf_config
    with set_current_vllm_config(config):
        moe = deepseek_v2.DeepseekV2MoE(
            config=hf_config,
            parallel_config=config.parallel_config,
            prefix=LAYER,
            **changes,
        )
    return moe.float()


def experts_of(moe: Any) -> Any:
    return next(module for module in moe.modules() if isinstance(module, RoutedExperts))


def randomise(moe: Any) -> None:
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5


def expected_output(moe: Any, hidden_states: Tensor, hf_config: Any) -> Tensor:
    """fp64: sigmoid router with groups and bias, routed and shared experts, by plain loops."""
    experts, rows = experts_of(moe), []
    scores = torch.sigmoid(hidden_states.double() @ moe.gate.weight.double().T)
    biased = scores + moe.gate.e_score_correction_bias.double()
    groups = biased.view(len(scores), hf_config.n_group, -1)
    best = groups.topk(2, dim=2).values.sum(2).topk(hf_config.topk_group, dim=1).indices
    for row, hidden in enumerate(hidden_states):
        allowed = torch.zeros(hf_config.n_group, 1, dtype=torch.bool)
        allowed[best[row]] = True
        choice = groups[row].masked_fill(~allowed, -1e9).flatten()
        ids = choice.topk(hf_config.num_experts_per_tok).indices
        weights = scores[row, ids] / scores[row, ids].sum() * hf_config.routed_scaling_factor
        routed = sum(
            weight * expert(hidden, experts.w13_weight[e], experts.w2_weight[e])
            for weight, e in zip(weights, ids, strict=True)
        )
        shared = moe.shared_experts
        rows.append(routed + expert(hidden, shared.gate_up_proj.weight, shared.down_proj.weight))
    return torch.stack(rows)


@pytest.mark.parametrize("strategy", ["auto", "dense", "gated", "ragged"])
def test_layer_equals_the_oracle(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_EXPERTS", strategy)
    config = make_config(moe_backend="static-ep", dtype="float32")
    torch.set_default_dtype(torch.float32)
    moe = build(config, apply_routed_scale_to_output=True)
    randomise(moe)
    hidden_states = torch.randn(9, 128)
    expected = expected_output(moe, hidden_states, config.model_config.hf_config)
    with set_current_vllm_config(config):
        process_weights_after_loading(moe, config.model_config, torch.device("cpu"))
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=9):
        actual = moe(hidden_states.clone())
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_other_backend_keeps_the_stock_class(make_config: MakeConfig) -> None:
    moe = build(make_config())
    assert type(experts_of(moe)) is RoutedExperts


def test_refused_layer_is_named(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_ep.adapters.vllm import moe_factory

    config = make_config(moe_backend="static-ep")
    monkeypatch.setattr(moe_factory, "refusal", lambda kwargs: "it is refused by this test")
    with pytest.raises(UnsupportedError, match=f"{LAYER}.experts: it is refused by this test"):
        build(config)


def test_allow_stock_leaves_it_and_lists_it_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    from vllm_moe_ep.adapters.vllm import moe_factory

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("VLLM_MOE_EP_ALLOW_STOCK", "1")
    config = make_config(moe_backend="static-ep")
    monkeypatch.setattr(moe_factory, "refusal", lambda kwargs: "it is refused by this test")
    moe = build(config)
    assert experts_of(moe).quant_method.__class__.__module__.startswith("vllm.")
    report(moe, config, is_draft=False)
    assert "replaced 0 of 1" in caplog.text
    # One record may reach the capture through two loggers.
    listed = [r for r in set(caplog.records) if f"{LAYER}.experts" in r.getMessage()]
    assert len(listed) == 1


def test_model_without_layers_is_refused_unless_it_is_a_draft(make_config: MakeConfig) -> None:
    config = make_config(moe_backend="static-ep")
    report(torch.nn.Linear(1, 1), config, is_draft=True)
    with pytest.raises(UnsupportedError, match="no DeepSeek MoE layer in Linear"):
        report(torch.nn.Linear(1, 1), config, is_draft=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"gate": None}, "no gate"),
        ({"has_bias": True}, "biases"),
        ({"activation": "gelu"}, "gelu"),
        ({"apply_router_weight_on_input": True}, "input"),
        ({"fuse_shared_experts": True}, "fused"),
    ],
)
def test_reasons_to_refuse_a_layer(changes: dict[str, Any], said: str | None) -> None:
    reason = refusal({"gate": object(), **changes})
    assert (reason is None) == (said is None)
    assert said is None or said in str(reason)
