"""vLLM's grouped fp8 kernel as our experts, against the oracle; where it applies."""

from typing import Any

import pytest
import torch
from layer_factory import config_of, local_of, tokens_of
from oracle import rel_l2
from quantised_factory import QuantisedFixture, make_quantised

from vllm_moe_ep.adapters.vllm import cpu_fp8_experts
from vllm_moe_ep.adapters.vllm.cpu_fp8_experts import PackedFp8Experts, applies, pack
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.strategy_experts import StrategyExperts
from vllm_moe_ep.quant.formats import FP8_128X128

MAX_ERROR = 1e-2


class Holder(torch.nn.Module):
    """Stands for vLLM's experts module: it holds the four parameters."""

    def __init__(self, fixture: QuantisedFixture, own: list[int]) -> None:
        super().__init__()
        for name, matrix in (("w13", fixture.w13), ("w2", fixture.w2)):
            for suffix, tensor in (("", matrix.values), ("_scale_inv", matrix.scale)):
                parameter = torch.nn.Parameter(tensor[own], requires_grad=False)
                self.register_parameter(f"{name}_weight{suffix}", parameter)


def ranks_sum(fixture: QuantisedFixture, ep_size: int) -> torch.Tensor:
    floats = fixture.floats
    values = torch.zeros(floats.hidden_states.shape)
    for rank in range(ep_size):
        local = local_of(floats, ep_size, rank)
        holder = Holder(fixture, list(local.global_ids))
        pack(holder)
        packed = PackedFp8Experts(holder, config_of(floats))
        experts = StrategyExperts(config_of(floats), local, packed, EPConfig())
        values += experts.compute(tokens_of(floats)).values
    return values


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("ep_size", [1, 2, 3])
def test_equals_the_oracle(num_tokens: int, ep_size: int) -> None:
    fixture = make_quantised(FP8_128X128, num_tokens)
    ids = fixture.floats.topk_ids
    ids[::5, 0] = -1
    ids[1::5, 1] = 16
    ids[2::5, 2] = ids[2::5, 3]
    assert rel_l2(ranks_sum(fixture, ep_size), fixture.floats.routed()) <= MAX_ERROR


def test_bad_expert_and_bad_row_stay_where_they_are() -> None:
    fixture = make_quantised(FP8_128X128, 32)
    ids = fixture.floats.topk_ids
    ids[ids == 15] = -1
    clean = ranks_sum(fixture, 2)
    fixture.w13.scale[15] = float("nan")
    fixture.w2.scale[15] = float("inf")
    fixture.floats.hidden_states[3] = float("nan")
    dirty = ranks_sum(fixture, 2)
    others = torch.arange(32) != 3
    assert torch.equal(dirty[others], clean[others])
    assert dirty[3].isnan().all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"experts": "ragged"}, True),
        ({"experts": "dense"}, False),
        ({"swiglu_limit": 7.0}, False),
        ({"hidden_dtype": torch.float16}, False),
        ({"hidden_size": 192}, False),
        ({"failure": "it is off"}, False),
    ],
)
def test_where_the_kernel_applies(
    changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_fp8_experts, "failure", lambda: changes.get("failure"))
    config = MoEConfig(
        num_experts=4,
        top_k=2,
        hidden_size=changes.get("hidden_size", 256),
        moe_intermediate_size=128,
        max_num_tokens=8,
        swiglu_limit=changes.get("swiglu_limit"),
    )
    dtype = changes.get("hidden_dtype", torch.bfloat16)
    assert applies(config, changes.get("experts", "auto"), dtype) == expected


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_fp8_experts.failure() is None
    right = cpu_fp8_experts._run

    def one_scale_wrong(rows: Any, slots: Any, weights: Any, packed: Any, scales: Any) -> Any:
        wrong = scales[1].clone()
        wrong[1, 0] *= 2
        return right(rows, slots, weights, packed, (scales[0], wrong))

    monkeypatch.setattr(cpu_fp8_experts, "_run", one_scale_wrong)
    cpu_fp8_experts.failure.cache_clear()
    assert "off by" in str(cpu_fp8_experts.failure())
    cpu_fp8_experts.failure.cache_clear()
