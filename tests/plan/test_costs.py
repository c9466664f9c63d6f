"""Each formula against counting: enumerated routings, real tensors, counted operations."""

import itertools
from typing import Any

import pytest
import torch
from layer_factory import config_of, shard_of, tokens_of
from oracle import make_fixture
from quantised_factory import experts_of, make_quantised
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.gather import gather_tokens
from vllm_moe_ep.layers.shared_expert import SharedExpert, slice_shared_expert
from vllm_moe_ep.layers.strategy_experts import run_experts
from vllm_moe_ep.plan import costs
from vllm_moe_ep.plan.costs import Spread
from vllm_moe_ep.plan.model import ModelShape
from vllm_moe_ep.plan.platforms import PLATFORMS
from vllm_moe_ep.quant.formats import FORMATS

TRN2 = PLATFORMS["trn2"]


def _shape(**changes: Any) -> ModelShape:
    values: dict[str, Any] = {
        "num_layers": 3,
        "num_experts": 16,
        "top_k": 4,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "shared_width": 256,
        "expert_format": "bf16",
        "shared_format": "bf16",
    }
    return ModelShape(**{**values, **changes})


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_rows"), [(4, 1, 4), (5, 2, 3), (6, 3, 2), (3, 3, 1), (4, 2, 0)]
)
def test_share_hit_by_enumeration(num_experts: int, top_k: int, num_rows: int) -> None:
    """Over every way to give each row its experts."""
    choices = list(itertools.combinations(range(num_experts), top_k))
    shares = [
        len(set(itertools.chain(*routing))) / num_experts
        for routing in itertools.product(choices, repeat=num_rows)
    ]
    model = _shape(num_experts=num_experts, top_k=top_k)
    assert costs.share_hit(model, num_rows) == pytest.approx(sum(shares) / len(shares))


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("expert_format", "name"),
    [("fp8", "fp8_128x128"), ("fp8-ue8m0", "fp8_128x128_ue8m0"), ("fp4", "fp4_1x32")],
)
def test_bytes_of_quantised_experts(expert_format: str, name: str) -> None:
    linears = experts_of(make_quantised(FORMATS[name], 1, num_experts=5), list(range(5)))
    parts = (linears.w13.values, linears.w13.scale, linears.w2.values, linears.w2.scale)
    assert _num_bytes(*parts) == 5 * _shape(expert_format=expert_format).expert_bytes


@pytest.mark.parametrize("ep_size", [1, 3, 4])
@pytest.mark.parametrize("is_replicated", [True, False])
def test_weight_bytes_of_the_fullest_rank(ep_size: int, is_replicated: bool) -> None:
    fixture = make_fixture(torch.bfloat16)
    model, spread = _shape(), Spread(ep_size, is_replicated)
    shared = SharedExpert(torch.zeros(512, 256).bfloat16(), torch.zeros(256, 256).bfloat16())
    totals = []
    for rank in range(ep_size):
        linears: Any = shard_of(fixture, ep_size, rank).linears
        part = slice_shared_expert(shared, ep_size if is_replicated else 1, rank)
        held = (linears.w13_weight, linears.w2_weight, part.w13_weight, part.w2_weight)
        totals.append(_num_bytes(*held))
    assert costs.weight_bytes(model, spread) == 3 * max(totals)


@pytest.mark.parametrize(("strategy", "num_rows"), [("dense", 24), ("grouped", 64)])
@pytest.mark.parametrize("ep_size", [1, 4])
def test_operations_are_those_counted(strategy: str, num_rows: int, ep_size: int) -> None:
    """On 64 rows with 1 of 16 experts each, four even shares are 16 rows."""
    fixture = make_fixture(torch.float32, num_rows, top_k=1)
    with FlopCounterMode(display=False) as counter:
        run_experts(strategy, tokens_of(fixture), shard_of(fixture, ep_size), EPConfig())
    model = _shape(top_k=1)
    expected = costs.routed_flops(model, Spread(ep_size), num_rows, strategy)
    assert counter.get_total_flops() == expected


def test_gated_experts_are_those_with_rows() -> None:
    """The mean over random routings of what a gate lets through."""
    model, hits = _shape(), []
    for _ in range(400):
        fixture = make_fixture(num_tokens=5, hidden_size=2, moe_intermediate_size=2)
        hits.append(len(set(fixture.topk_ids.flatten().tolist())))
    expected = costs.computed_experts(model, Spread(1), 5, "gated")
    # Ten standard errors of the mean of numbers between 4 and 16.
    assert sum(hits) / len(hits) == pytest.approx(expected, abs=10 * 2 / 20)
    assert costs.computed_rows(model, 5, "gated") == 5


class RecordedGather(SingleProcess):
    """Two token ranks; keeps what is sent."""

    token_size = 2

    def all_gather(self, rows: Tensor) -> Tensor:
        self.received = torch.cat([rows, rows])
        return self.received


def test_gathered_and_reduced_bytes() -> None:
    fixture = make_fixture(torch.bfloat16, 7, hidden_size=100, num_experts=16, top_k=3)
    model = _shape(hidden_size=100, top_k=3)
    group = RecordedGather()
    gather_tokens(tokens_of(fixture), 7, config_of(fixture), EPConfig(), group)
    assert costs.gathered_bytes(model, Spread(2, False), 14) == _num_bytes(group.received)
    assert costs.gathered_bytes(model, Spread(2, True), 14) == 0
    assert costs.reduced_bytes(model, Spread(2), 14) == _num_bytes(torch.zeros(14, 100))
    assert costs.reduced_bytes(model, Spread(1), 14) == 0


@pytest.mark.parametrize(
    ("spread", "number", "seconds"),
    [
        (Spread(1), 0, None),
        (Spread(64), 1, 2.01e-3),
        (Spread(64, False), 2, 3.37e-3),
        (Spread(6), 1, 3.37e-3),
        (Spread(4), 1, 3.37e-3),
    ],
)
def test_collectives(spread: Spread, number: int, seconds: float | None) -> None:
    """The sum in two steps wants whole devices, more than one, and replicated tokens."""
    assert costs.num_collectives(spread) == number
    assert seconds is None or costs.collective_seconds(spread, TRN2) == seconds


def test_activation_bytes() -> None:
    parts = torch.zeros(9, 2 * 128), torch.zeros(9, 256), torch.zeros(9, 256)
    assert costs.activation_bytes(_shape(), 9) == _num_bytes(*parts)
