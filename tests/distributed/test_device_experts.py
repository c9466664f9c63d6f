"""The layer around grouped kernels in gloo processes; the oracle stands in for the kernels."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import Fixture, make_fixture, rel_l2
from process_pool import ProcessPool, Worker
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.device_experts import DeviceExperts
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.stages import RoutedTokens

NUM_EXPERTS = 8
UNEVEN = (5, 0, 3, 6)


def local_oracle(fixture: Fixture, first: int, count: int) -> Any:
    """The experts [first, first + count) alone, fp64 rounded to the activations' dtype."""

    def experts(tokens: RoutedTokens) -> Tensor:
        is_local = (tokens.topk_ids >= first) & (tokens.topk_ids < first + count)
        share = replace(
            fixture,
            hidden_states=tokens.hidden_states,
            topk_ids=torch.where(is_local, tokens.topk_ids, -1),
            topk_weights=tokens.topk_weights,
        )
        return share.routed().to(tokens.hidden_states.dtype)

    return experts


def one_step(worker: Worker, layout: tuple[int, int], fixture: Fixture) -> tuple[Tensor, Counter]:
    groups = worker.layouts[layout]
    collectives = TorchDistributed(groups.token_group, groups.replica_group)
    token_rank = collectives.token_rank
    count = NUM_EXPERTS // (layout[0] * layout[1])
    first = count * (token_rank * layout[1] + collectives.replica_rank)
    config = MoEConfig(
        num_experts=NUM_EXPERTS,
        top_k=fixture.topk_ids.shape[1],
        hidden_size=32,
        moe_intermediate_size=16,
        max_num_tokens=8,
    )
    experts = DeviceExperts(local_oracle(fixture, first, count), fixture.dtype)
    layer = EPLayer(config, experts, collectives, EPConfig())
    own = slice(sum(UNEVEN[:token_rank]), sum(UNEVEN[: token_rank + 1]))
    rows = [part[own] for part in (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)]
    valid = torch.ones(rows[0].shape[0], dtype=torch.bool)
    valid[:1] = False
    return layer(*rows, capacity=8, valid=valid), collectives.counts


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_equals_the_oracle(processes: ProcessPool, layout: tuple[int, int]) -> None:
    fixture = make_fixture(
        torch.float32,
        sum(UNEVEN[: layout[0]]),
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=NUM_EXPERTS,
        top_k=3,
    )
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture)
    expected = fixture.routed().split(list(UNEVEN[: layout[0]]))
    for rank, (output, counts) in enumerate(results):
        wanted = expected[rank // layout[1]].clone()
        wanted[:1] = 0
        assert rel_l2(output, wanted) <= 1e-5
        gathers = {"all_gather": 1, "reduce_scatter": 1} if layout[0] > 1 else {}
        sums = {"all_reduce": 1} if layout[1] > 1 else {}
        assert counts == Counter({**gathers, **sums})
