"""Quantised experts and shared-expert slices in real gloo processes, against the oracle."""

from dataclasses import dataclass
from typing import Any

import pytest
import quant_oracle
import torch
from layer_factory import STRATEGIES, config_of
from oracle import rel_l2, shared_expert
from process_pool import ProcessPool, Worker
from quantised_factory import (
    QuantisedFixture,
    RawMatrix,
    cast_of,
    exact_halves,
    experts_of,
    make_quantised,
    random_halves,
    random_matrix,
)
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.shared_expert import SharedExpert, slice_shared_expert
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement
from vllm_moe_ep.quant.formats import (
    FP4_1X32,
    FP8_1X32_UE8M0,
    FP8_1X128,
    FP8_128X128,
    FP8_128X128_UE8M0,
    QuantFormat,
)
from vllm_moe_ep.quant.weight import Quantised

Layout = tuple[int, int]
SHARED_WIDTH = 384


@dataclass(frozen=True)
class Case:
    """A fixture with the rows of all token ranks, equally many each, and a shared expert."""

    fixture: QuantisedFixture
    shared_w13: RawMatrix
    shared_w2: RawMatrix
    shared_fmt: QuantFormat
    activation: QuantFormat | None


def one_step(worker: Worker, layout: Layout, case: Case) -> Tensor:
    groups = worker.layouts[layout]
    ours = TorchDistributed(groups.token_group, groups.replica_group)
    ep_rank = ours.token_rank * ours.replica_size + ours.replica_rank
    local = ExpertPlacement.linear(16, layout[0] * layout[1]).local(ep_rank)
    floats = case.fixture.floats
    linears = experts_of(case.fixture, list(local.global_ids), case.activation)
    layer = strategy_layer(config_of(floats), local, linears, ours)
    block_size = case.shared_fmt.block_size
    whole = SharedExpert(
        Quantised.of_halves(case.shared_w13.values, case.shared_w13.scale, block_size),
        Quantised(case.shared_w2.values, case.shared_w2.scale, block_size),
        activation=case.activation,
    )
    shared = slice_shared_expert(whole, ours.replica_size, ours.replica_rank)
    own = slice(8 * ours.token_rank, 8 * (ours.token_rank + 1))
    rows = floats.hidden_states[own], floats.topk_ids[own], floats.topk_weights[own]
    return layer(*rows, capacity=8, shared=shared, shared_is_partial=shared.is_partial)


@pytest.mark.parametrize("layout", [(1, 4), (4, 1), (2, 2), (1, 3)], ids=str)
@pytest.mark.parametrize(
    ("fmt", "shared_fmt", "activation"),
    [
        (FP8_128X128, FP8_128X128, None),
        (FP8_128X128, FP8_128X128, FP8_1X128),
        (FP4_1X32, FP8_128X128_UE8M0, None),
        (FP4_1X32, FP8_128X128_UE8M0, FP8_1X32_UE8M0),
    ],
    ids=["fp8", "fp8-cast", "fp4", "fp4-cast"],
)
def test_routed_and_shared_experts(
    processes: ProcessPool,
    layout: Layout,
    fmt: QuantFormat,
    shared_fmt: QuantFormat,
    activation: QuantFormat | None,
) -> None:
    """The shared expert is whole on each of two replicas, and three slices on more."""
    fixture = make_quantised(fmt, 8 * layout[0], hidden_size=64, moe_intermediate_size=32)
    w13 = random_halves(shared_fmt, (), SHARED_WIDTH, 64)
    w2 = random_matrix(shared_fmt, (), 64, SHARED_WIDTH)
    case = Case(fixture, w13, w2, shared_fmt, activation)
    results = processes.run(one_step, layout[0] * layout[1], layout, case)
    floats, cast = fixture.floats, cast_of(activation)
    exact_w2 = quant_oracle.dequantise(w2.values, w2.scale, *shared_fmt.block_size)
    exact_w13 = exact_halves(w13, shared_fmt, SHARED_WIDTH)
    expected = floats.routed(cast=cast)
    expected += shared_expert(floats.hidden_states, exact_w13, exact_w2, cast)
    for rank, output in enumerate(results):
        assert output.dtype == torch.bfloat16
        own = expected.split(8)[rank // layout[1]]
        assert rel_l2(output, own) <= fmt.output_limit


def uneven_step(
    worker: Worker,
    layout: Layout,
    fixture: QuantisedFixture,
    activation: QuantFormat,
    counts: list[int],
    options: dict[str, Any],
) -> tuple[Tensor, dict[str, int]]:
    groups = worker.layouts[layout]
    ours = TorchDistributed(groups.token_group, groups.replica_group)
    ep_rank = ours.token_rank * ours.replica_size + ours.replica_rank
    local = ExpertPlacement.linear(16, layout[0] * layout[1]).local(ep_rank)
    linears = experts_of(fixture, list(local.global_ids), activation)
    floats = fixture.floats
    layer = strategy_layer(config_of(floats), local, linears, ours, EPConfig(**options))
    own = slice(sum(counts[: ours.token_rank]), sum(counts[: ours.token_rank + 1]))
    rows = floats.hidden_states[own], floats.topk_ids[own], floats.topk_weights[own]
    return layer(*rows, capacity=max(counts)), dict(ours.counts)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", [(3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("activation", [FP8_1X128, FP8_1X32_UE8M0], ids=lambda fmt: fmt.name)
def test_rows_sent_in_fp8(
    processes: ProcessPool, layout: Layout, strategy: str, activation: QuantFormat
) -> None:
    """One all-gather, whatever is sent; ranks with less than the capacity or nothing; the same
    bits as of rows that are cast only after the gather."""
    counts = [5, 0, 7][: layout[0]]
    fixture = make_quantised(FP8_128X128, sum(counts), hidden_size=64, moe_intermediate_size=32)
    fixture.floats.topk_ids[0] = -1
    num_ranks, steps = layout[0] * layout[1], []
    for gather in ("bytes", "fp32"):
        options = {"experts": strategy, "expert_capacity": 13, "gather": gather}
        steps.append(
            processes.run(uneven_step, num_ranks, layout, fixture, activation, counts, options)
        )
    expected = fixture.floats.routed(cast=cast_of(activation)).split(counts)
    for rank, ((output, entered), (late, _)) in enumerate(zip(*steps, strict=True)):
        assert rel_l2(output, expected[rank // layout[1]]) <= FP8_128X128.output_limit
        assert torch.equal(output, late)
        assert entered["all_gather"] == 1
