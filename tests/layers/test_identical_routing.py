"""Very many rows that all go to the same expert, as a profiling batch of equal tokens does."""

import pytest
import torch
from layer_factory import shard_of, tokens_of
from oracle import assert_close, expert, make_fixture

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.strategy_experts import run_experts

NUM_ROWS = 100_000


@pytest.mark.parametrize("strategy", ["dense", "gated", "grouped", "ragged"])
def test_one_expert_gets_every_row(strategy: str) -> None:
    fixture = make_fixture(
        torch.bfloat16, NUM_ROWS, hidden_size=64, moe_intermediate_size=16, num_experts=8, top_k=1
    )
    fixture.topk_ids[:] = 7
    ep_config = EPConfig(expert_capacity=NUM_ROWS)
    # Four ranks: the expert is the last one of the last rank.
    others = run_experts(strategy, tokens_of(fixture), shard_of(fixture, 4, 0), ep_config)
    assert not others.values.any()
    output = run_experts(strategy, tokens_of(fixture), shard_of(fixture, 4, 3), ep_config)
    assert output.overflow is None or output.overflow.tolist() == [0]
    sampled = [0, 1, 16_383, 65_535, 65_536, NUM_ROWS - 1]
    expected = [
        expert(
            fixture.hidden_states[row],
            fixture.w13_weight[7],
            fixture.w2_weight[7],
            weight=fixture.topk_weights[row, 0].item(),
        )
        for row in sampled
    ]
    assert_close(output.values[sampled], torch.stack(expected), torch.bfloat16)
    assert output.values.isfinite().all()


def test_automatic_grouping_overflows_and_says_so() -> None:
    fixture = make_fixture(num_tokens=512, hidden_size=8, moe_intermediate_size=4, top_k=1)
    fixture.topk_ids[:] = 7
    output = run_experts("grouped", tokens_of(fixture), shard_of(fixture), EPConfig())
    assert output.overflow is not None and output.overflow.tolist() == [1]
