"""vLLM's grouped CPU kernel as our experts, against the oracle; where it applies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_factory import config_of, local_of, tokens_of
from oracle import REL_L2_LIMIT, Fixture, make_fixture, rel_l2

from vllm_moe_ep.adapters.vllm.cpu_experts import PackedCpuExperts, max_aliased_rows, pack
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.fused_experts import alias_foreign
from vllm_moe_ep.layers.strategy_experts import StrategyExperts


def has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


AMX = pytest.param(
    torch.bfloat16, "amx", marks=pytest.mark.skipif(not has_amx(), reason="no AMX here")
)
with_each_kernel = pytest.mark.parametrize(
    ("dtype", "isa"), [(torch.float32, "vec"), (torch.bfloat16, "vec"), AMX]
)


class Holder(torch.nn.Module):
    """Stands for vLLM's experts module: it holds the two parameters."""

    def __init__(self, fixture: Fixture, own: list[int]) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(fixture.w13_weight[own], requires_grad=False)
        self.w2_weight = torch.nn.Parameter(fixture.w2_weight[own], requires_grad=False)


def ranks_sum(fixture: Fixture, ep_size: int, isa: str = "vec") -> torch.Tensor:
    values = torch.zeros(fixture.hidden_states.shape)
    for rank in range(ep_size):
        local = local_of(fixture, ep_size, rank)
        holder = Holder(fixture, list(local.global_ids))
        pack(holder, isa)
        packed = PackedCpuExperts(holder, isa, config_of(fixture))
        experts = StrategyExperts(config_of(fixture), local, packed, EPConfig())
        values += experts.compute(tokens_of(fixture)).values
    return values


@with_each_kernel
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("ep_size", [1, 2, 3, 16])
def test_equals_the_oracle(dtype: torch.dtype, isa: str, num_tokens: int, ep_size: int) -> None:
    fixture = make_fixture(dtype, num_tokens)
    fixture.topk_ids[::5, 0] = -1
    fixture.topk_ids[1::5, 1] = 16
    fixture.topk_ids[2::5, 2] = fixture.topk_ids[2::5, 3]
    assert rel_l2(ranks_sum(fixture, ep_size, isa), fixture.routed()) <= REL_L2_LIMIT[dtype]


def test_bad_expert_and_bad_row_stay_where_they_are() -> None:
    fixture = make_fixture(torch.bfloat16, 32)
    fixture.topk_ids[fixture.topk_ids == 15] = -1
    clean = ranks_sum(fixture, 2)
    fixture.w13_weight[15] = float("nan")
    fixture.w2_weight[15] = float("inf")
    fixture.hidden_states[3] = float("nan")
    dirty = ranks_sum(fixture, 2)
    others = torch.arange(32) != 3
    assert torch.equal(dirty[others], clean[others])
    assert dirty[3].isnan().all()


@with_each_kernel
@pytest.mark.parametrize("num_tokens", [1, 5, 16])
@pytest.mark.parametrize("ep_size", [1, 2, 16])
def test_aliased_rows_equal_the_oracle(
    dtype: torch.dtype, isa: str, num_tokens: int, ep_size: int
) -> None:
    fixture = make_fixture(dtype, num_tokens)
    fixture.topk_ids[::5, 0] = -1
    values = torch.zeros(fixture.hidden_states.shape)
    for rank in range(ep_size):
        local = local_of(fixture, ep_size, rank)
        holder = Holder(fixture, list(local.global_ids))
        pack(holder, isa)
        packed = PackedCpuExperts(holder, isa, config_of(fixture))
        shard = ExpertShard(local, packed, None)
        routing = alias_foreign(fixture.topk_ids, fixture.topk_weights, shard)
        output = packed.fused(fixture.hidden_states, routing.slots, routing.weights)
        values += torch.where(routing.has_local, output.float(), 0.0)
    assert rel_l2(values, fixture.routed()) <= REL_L2_LIMIT[dtype]


@pytest.mark.parametrize(("hidden_size", "expected"), [(256, 16), (2048, 2), (1 << 20, 1)])
def test_fewer_rows_are_aliased_the_wider_the_experts(hidden_size: int, expected: int) -> None:
    config = MoEConfig(
        num_experts=16,
        top_k=4,
        hidden_size=hidden_size,
        moe_intermediate_size=128,
        max_num_tokens=64,
    )
    assert max_aliased_rows(config) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "kernel"),
        ({"isa": "amx", "grants_amx": True}, "amx"),
        ({"isa": "amx", "grants_amx": False}, "vec"),
        ({"experts": "ragged"}, "kernel"),
        ({"experts": "dense"}, None),
        ({"dtype": torch.float16}, None),
        ({"limit": 7.0}, None),
    ],
)
def test_where_the_kernel_applies(
    changes: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from vllm_moe_ep.adapters.vllm import cpu_experts

    fixture = make_fixture(changes.get("dtype", torch.bfloat16), 1)
    layer = Holder(fixture, list(range(16)))
    layer.moe_config = SimpleNamespace(  # type: ignore[assignment]
        hidden_dim=256,
        intermediate_size_per_partition=128,
        activation=MoEActivation.SILU,
        moe_backend="static_ep",
    )
    selected = SimpleNamespace(
        isa=changes.get("isa", "kernel"),
        output_alignment=32,
        _supports_grouped_gemm=lambda config: (True, None),
    )
    monkeypatch.setattr(
        cpu_experts, "select_unquantized_moe_backend", lambda moe_config: ("CPU", selected)
    )
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: changes["grants_amx"])
    config = config_of(fixture, changes.get("limit"))
    assert cpu_experts.kernel_isa(layer, config, changes.get("experts", "auto")) == expected
