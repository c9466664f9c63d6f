"""Packing, seen through a token group whose ranks are played one after the other."""

import pytest
import quant_oracle
import torch
from quantised_factory import ACTIVATIONS
from torch import Tensor

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.quant.formats import QuantFormat
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
    per_rank: list[RoutedTokens],
    capacity: int,
    config: MoEConfig,
    path: str,
    activation: QuantFormat | None = None,
) -> RoutedTokens:
    group = RecordedGather(len(per_rank))
    ep_config = EPConfig(gather=path)
    for tokens in per_rank:
        gathered = gather_tokens(tokens, capacity, config, ep_config, group, activation)
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


each_activation = pytest.mark.parametrize(
    "activation", [fmt for fmt in ACTIVATIONS if fmt], ids=lambda fmt: fmt.name
)


def _random_tokens(num_tokens: int, hidden_size: int) -> RoutedTokens:
    return RoutedTokens(
        torch.randn(num_tokens, hidden_size).bfloat16(),
        torch.randint(0, 8, (num_tokens, 3)),
        torch.rand(num_tokens, 3),
    )


def _blocks(fmt: QuantFormat) -> quant_oracle.Blocks:
    return quant_oracle.Blocks(*fmt.block_size, fmt.max_value, fmt.is_power_of_two, False)


@each_activation
@pytest.mark.parametrize("hidden_size", [256, 100, 13])
def test_rows_in_fp8_arrive_as_the_cast_leaves_them(
    activation: QuantFormat, hidden_size: int
) -> None:
    """One collective; padding, whose scales are NaN too, selects no expert."""
    config = MoEConfig(
        num_experts=8, top_k=3, hidden_size=hidden_size, moe_intermediate_size=1, max_num_tokens=8
    )
    counts, capacity = [3, 0, 5], 5
    per_rank = [_random_tokens(count, hidden_size) for count in counts]
    per_rank[2].hidden_states[1, 0] = torch.nan
    gathered = _gather(per_rank, capacity, config, "bytes", activation)
    assert gathered.is_cast and gathered.hidden_states.dtype == torch.float32
    blocks = _blocks(activation)
    for rank, tokens in enumerate(per_rank):
        start, end = rank * capacity, rank * capacity + counts[rank]
        clean = tokens.hidden_states.isfinite().all(dim=1)
        kept = quant_oracle.quantise_dequantise(tokens.hidden_states[clean], blocks).float()
        arrived = gathered.hidden_states[start:end]
        assert torch.equal(arrived[clean], kept)
        assert arrived[~clean].isnan().any(dim=1).all()
        assert torch.equal(gathered.topk_ids[start:end], tokens.topk_ids.int())
        assert torch.equal(gathered.topk_weights[start:end], tokens.topk_weights)
        padding = slice(end, start + capacity)
        assert (gathered.topk_ids[padding] == -1).all()
        assert gathered.topk_weights[padding].isnan().all()
        assert gathered.hidden_states[padding].isnan().all()


def _up_to_16(num_bytes: int) -> int:
    return num_bytes + -num_bytes % 16


@each_activation
@pytest.mark.parametrize("hidden_size", [256, 100, 13])
def test_bytes_of_a_row_in_fp8(activation: QuantFormat, hidden_size: int) -> None:
    """Values, scales, ids, weights, each from a 16-byte boundary; all 0xFF where nothing is."""
    config = MoEConfig(
        num_experts=8, top_k=3, hidden_size=hidden_size, moe_intermediate_size=1, max_num_tokens=8
    )
    tokens = _random_tokens(2, hidden_size)
    group = RecordedGather(2)
    gather_tokens(tokens, 4, config, EPConfig(), group, activation)
    (sent,) = group.sent
    num_scales = -(-hidden_size // activation.block_size[1])
    scale_bytes = num_scales * (1 if activation.is_power_of_two else 4)
    sizes = [hidden_size, scale_bytes, 12, 12]
    starts = [sum(map(_up_to_16, sizes[:part])) for part in range(5)]
    assert sent.dtype == torch.uint8 and sent.shape == (4, starts[-1])
    assert (sent[2:] == 0xFF).all()
    spans = [
        sent[:2, start : start + size].contiguous()
        for start, size in zip(starts, sizes, strict=False)
    ]
    scale = spans[1] if activation.is_power_of_two else spans[1].view(torch.float32)
    values = spans[0].view(torch.float8_e4m3fn)
    numbers = quant_oracle.dequantise(values, scale, *activation.block_size)
    assert torch.equal(
        numbers, quant_oracle.quantise_dequantise(tokens.hidden_states, _blocks(activation))
    )
    assert torch.equal(spans[2].view(torch.int32), tokens.topk_ids.int())
    assert torch.equal(spans[3].view(torch.float32), tokens.topk_weights)
    covered = torch.zeros(starts[-1], dtype=torch.bool)
    for start, size in zip(starts, sizes, strict=False):
        covered[start : start + size] = True
    assert (sent[:, ~covered] == 0xFF).all()


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
