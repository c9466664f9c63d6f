"""Where vLLM puts experts, as the layer reads it from vLLM's own maps."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from tests.adapters.conftest import DEEPSEEK_V3, MakeConfig
from vllm_moe_ep.adapters.vllm.engine_config import prepare
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.placement import ExpertPlacement, LocalExperts

# With fewer experts than ranks, round_robin fails in vLLM itself.
SIZES = [("linear", 5, 8)] + [
    (strategy, num_experts, ep_size)
    for strategy in ("linear", "round_robin")
    for num_experts, ep_size in ((16, 4), (30, 8), (256, 3))
]


@pytest.mark.parametrize(("strategy", "num_experts", "ep_size"), SIZES)
def test_maps_of_both_strategies(strategy: str, num_experts: int, ep_size: int) -> None:
    place = getattr(ExpertPlacement, strategy)(num_experts, ep_size)
    for rank in range(ep_size):
        count, expert_map, _ = determine_expert_map(ep_size, rank, num_experts, strategy)
        assert isinstance(expert_map, torch.Tensor)
        local = LocalExperts.from_expert_map(expert_map.tolist())
        assert local.num_local_experts == count
        assert local == place.local(rank)


def test_moving_experts_is_refused_at_start(make_config: MakeConfig) -> None:
    """vLLM itself allows it on some platforms only; this refusal comes first on all."""
    config: Any = make_config(
        moe_backend="static-ep", tensor_parallel_size=2, enable_expert_parallel=True
    )
    config.parallel_config.enable_eplb = True
    with pytest.raises(UnsupportedError, match="drop --enable-eplb"):
        prepare(config)


@pytest.mark.parametrize(
    ("placement", "model", "ranks", "expected"),
    [
        ("auto", {}, {"tensor_parallel_size": 2}, "round_robin"),
        ("auto", {"n_group": 1, "topk_group": 1}, {"tensor_parallel_size": 2}, "linear"),
        ("auto", {}, {"data_parallel_size": 2}, "linear"),
        ("auto", {"num_attention_heads": 16}, {"tensor_parallel_size": 16}, "linear"),
        ("linear", {}, {"tensor_parallel_size": 2}, "linear"),
        ("round_robin", {}, {"tensor_parallel_size": 2}, "round_robin"),
    ],
)
def test_experts_of_a_grouped_router_are_spread(
    make_config: MakeConfig,
    placement: str,
    model: dict[str, int],
    ranks: dict[str, int],
    expected: str,
) -> None:
    config: Any = make_config(
        moe_backend="static-ep",
        enable_expert_parallel=True,
        additional_config={"moe_ep": {"placement": placement}},
        model={**DEEPSEEK_V3, **model},
        **ranks,
    )
    assert config.parallel_config.expert_placement_strategy == expected


def test_another_backend_keeps_its_placement(make_config: MakeConfig) -> None:
    config: Any = make_config(tensor_parallel_size=2, enable_expert_parallel=True)
    assert config.parallel_config.expert_placement_strategy == "linear"
