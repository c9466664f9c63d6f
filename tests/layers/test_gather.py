"""Packing, seen through a token group whose ranks are played one after the other."""

import pytest
import torch
from torch import Tensor

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.stages import RoutedTokens


class RecordedGather(SingleProcess):
    """A token group of several ranks: collects what each sends, then answers with all of it."""

    def __init__(self, token_size: int) -> None:
        super().__init__()
        self.token_size = token_size
        self.sent: list[Tensor] = []

    def all_gather(self, rows: Tensor) -> Tensor:
        self.sent.append(rows)
        missing = self.token_size - len(self.sent)
        return torch.cat([*self.sent, *[rows] * missing])


def _gather(
    per_rank: list[RoutedTokens], capacity: int, config: MoEConfig, path: str
) -> RoutedTokens:
    group = RecordedGather(len(per_rank))
    for tokens in per_rank:
        gathered = gather_tokens(tokens, capacity, config, EPConfig(gather=path), group)
    assert all(len(sent) == capacity for sent in group.sent)
    return gathered


@pytest.mark.parametrize("path", ["bytes", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(32, 4), (13, 3), (1, 1)])
def test_gather_is_lossless(path: str, dtype: torch.dtype, hidden_size: int, top_k: int) -> None:
    config = MoEConfig(
        num_experts=1025,
        top_k=top_k,
        hidden_size=hidden_size,
        moe_intermediate_size=1,
        max_num_tokens=8,
    )
    counts, capacity = [3, 0, 5], 5
    per_rank = [
        RoutedTokens(
            torch.randn(count, hidden_size).to(dtype),
            torch.randint(1000, 1025, (count, top_k)),
            torch.rand(count, top_k).to(dtype),
        )
        for count in counts
    ]
    gathered = _gather(per_rank, capacity, config, path)
    assert gathered.hidden_states.dtype == dtype
    for rank, tokens in enumerate(per_rank):
        start, end = rank * capacity, rank * capacity + counts[rank]
        assert torch.equal(gathered.hidden_states[start:end], tokens.hidden_states)
        assert torch.equal(gathered.topk_ids[start:end], tokens.topk_ids.int())
        assert torch.equal(gathered.topk_weights[start:end], tokens.topk_weights.float())
        assert (gathered.topk_ids[end : start + capacity] == -1).all()


def test_padding_bytes() -> None:
    """All 0xFF: the ids read -1, the weights and activations NaN."""
    config = MoEConfig(
        num_experts=8, top_k=2, hidden_size=8, moe_intermediate_size=1, max_num_tokens=8
    )
    tokens = RoutedTokens(torch.randn(1, 8).bfloat16(), torch.zeros(1, 2).int(), torch.rand(1, 2))
    gathered = _gather([tokens, tokens], 2, config, "bytes")
    assert gathered.topk_ids.tolist() == [[0, 0], [-1, -1]] * 2
    assert gathered.topk_weights[1].isnan().all()
    assert gathered.hidden_states[1].isnan().all()


@pytest.mark.parametrize("path", ["bytes", "fp32"])
def test_ids_without_an_expert_are_sent_as_minus_one(path: str) -> None:
    config = MoEConfig(
        num_experts=8, top_k=2, hidden_size=4, moe_intermediate_size=1, max_num_tokens=8
    )
    ids = torch.tensor([[7, 8], [2**32 + 1, -5]])
    tokens = RoutedTokens(torch.randn(2, 4), ids, torch.rand(2, 2))
    gathered = _gather([tokens, tokens], 2, config, path)
    assert gathered.topk_ids.tolist() == [[7, -1], [-1, -1]] * 2


def test_one_token_rank_packs_nothing() -> None:
    config = MoEConfig(
        num_experts=8, top_k=2, hidden_size=4, moe_intermediate_size=1, max_num_tokens=8
    )
    tokens = RoutedTokens(torch.randn(2, 4), torch.zeros(2, 2).int(), torch.rand(2, 2))
    assert gather_tokens(tokens, 8, config, EPConfig(), SingleProcess()) is tokens
