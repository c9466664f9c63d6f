"""The layer in real gloo processes, against the oracle.

A fixture holds the rows of all token ranks; ``counts`` says how many each of them brings.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_factory import STRATEGIES, config_of, layer_of, linears_of
from oracle import Fixture, assert_close, make_fixture, shared_expert
from process_pool import ProcessPool, Worker
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.shared_expert import SharedExpert, slice_shared_expert
from vllm_moe_ep.layers.strategy_experts import strategy_layer
from vllm_moe_ep.placement import ExpertPlacement

Layout = tuple[int, int]
LAYOUTS: list[Layout] = [(1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNEVEN = [9, 0, 3, 16]
each_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout))
)


def _small(num_tokens: int, dtype: torch.dtype = torch.float32, num_experts: int = 16) -> Fixture:
    return make_fixture(
        dtype,
        num_tokens,
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=num_experts,
        top_k=min(4, num_experts),
    )


def _layer(worker: Worker, layout: Layout, fixture: Fixture, **ep_options: Any) -> EPLayer:
    groups = worker.layouts[layout]
    ep_config = EPConfig(**{"expert_capacity": 64, **ep_options})
    collectives = TorchDistributed(groups.token_group, groups.replica_group)
    return layer_of(fixture, ep_config, collectives)


def _own_rows(fixture: Fixture, counts: Sequence[int], token_rank: int) -> tuple[Tensor, ...]:
    own = slice(sum(counts[:token_rank]), sum(counts[: token_rank + 1]))
    return fixture.hidden_states[own], fixture.topk_ids[own], fixture.topk_weights[own]


def _by_token_rank(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    return list(rows.split(list(counts)))


def one_step(
    worker: Worker, layout: Layout, fixture: Fixture, counts: Sequence[int], ep_options: dict
) -> dict[str, Any]:
    """A whole step, with what it entered."""
    layer = _layer(worker, layout, fixture, **ep_options)
    rows = _own_rows(fixture, counts, layer.collectives.token_rank)
    output = layer(*rows, capacity=max(*counts, 1))
    return {"output": output, "counts": layer.collectives.counts}


def _counts_of_a_step(layout: Layout, with_flag: bool) -> Counter[str]:
    """Collectives of a step.

    The overflow flag of grouped experts is one collective per group, except on replicated tokens:
    there it travels in the all-reduce.
    """
    counts: Counter[str] = Counter()
    if layout[0] > 1:
        counts.update(all_gather=1, reduce_scatter=1)
    if layout[1] > 1:
        counts.update(all_reduce=1)
    if with_flag and layout[0] > 1:
        counts.update(all_reduce_max=1 + (layout[1] > 1))
    return counts


def _check_step(
    results: list[dict[str, Any]],
    layout: Layout,
    fixture: Fixture,
    counts: Sequence[int],
    with_flag: bool = False,
) -> None:
    expected = _by_token_rank(fixture.routed(), counts)
    for rank, result in enumerate(results):
        assert result["output"].dtype == fixture.dtype
        assert_close(result["output"], expected[rank // layout[1]], fixture.dtype)
        assert result["counts"] == _counts_of_a_step(layout, with_flag)


@each_layout
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_and_empty_ranks(
    processes: ProcessPool, layout: Layout, strategy: str, dtype: torch.dtype
) -> None:
    counts = UNEVEN[: layout[0]]
    fixture = _small(sum(counts), dtype)
    # One row less than gathered: "grouped" is really used, and the row without experts ensures
    # that none overflows.
    fixture.topk_ids[0] = -1
    options = {"experts": strategy, "expert_capacity": layout[0] * max(counts) - 1}
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, options)
    _check_step(results, layout, fixture, counts, with_flag=strategy == "grouped")


@each_layout
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp32_gather(processes: ProcessPool, layout: Layout, dtype: torch.dtype) -> None:
    counts = UNEVEN[: layout[0]]
    fixture = _small(sum(counts), dtype)
    options = {"gather": "fp32"}
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, options)
    _check_step(results, layout, fixture, counts)


@each_layout
@pytest.mark.parametrize("num_experts", [30, 5, 3])
def test_experts_that_do_not_divide(
    processes: ProcessPool, layout: Layout, num_experts: int
) -> None:
    """Every expert has a row; with three experts the last of four ranks has none of them."""
    counts = [15] * layout[0]
    fixture = _small(sum(counts), num_experts=num_experts)
    fixture.topk_ids[:, 0] = torch.arange(sum(counts)).remainder(num_experts)
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, {})
    _check_step(results, layout, fixture, counts)


@each_layout
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint32])
def test_id_dtypes_and_strides(processes: ProcessPool, layout: Layout, dtype: torch.dtype) -> None:
    counts = UNEVEN[: layout[0]]
    fixture = _small(sum(counts))
    wide = torch.full((sum(counts), 8), 3, dtype=dtype)
    wide[:, ::2] = fixture.topk_ids.to(dtype)
    fixture = replace(fixture, topk_ids=wide[:, ::2])
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, {})
    _check_step(results, layout, fixture, counts)


@each_layout
@pytest.mark.parametrize("strategy", ["dense", "ragged"])
@pytest.mark.parametrize("nothing", [-1, 16, 23])
def test_rows_without_experts(
    processes: ProcessPool, layout: Layout, strategy: str, nothing: int
) -> None:
    """Exactly zero on every rank: a naive lookup of -1 finds the last expert of the last rank."""
    counts = [8] * layout[0]
    fixture = _small(sum(counts), torch.bfloat16)
    empty = torch.rand(sum(counts)) < 0.5
    fixture.topk_ids[empty] = nothing
    fixture.topk_ids[:, 1] = nothing
    options = {"experts": strategy}
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, options)
    _check_step(results, layout, fixture, counts)
    for rank, result in enumerate(results):
        own_empty = _by_token_rank(empty, counts)[rank // layout[1]]
        zeros = torch.zeros(int(own_empty.sum()), 32)
        assert torch.equal(result["output"][own_empty].float(), zeros)


@each_layout
def test_no_row_on_any_rank_has_an_expert(processes: ProcessPool, layout: Layout) -> None:
    counts = UNEVEN[: layout[0]]
    fixture = _small(sum(counts))
    fixture.topk_ids[:] = -1
    results = processes.run(one_step, layout[0] * layout[1], layout, fixture, counts, {})
    for rank, result in enumerate(results):
        assert torch.equal(result["output"], torch.zeros(counts[rank // layout[1]], 32))


@each_layout
@pytest.mark.parametrize("strategy", ["dense", "ragged"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_stays_alone(
    processes: ProcessPool, layout: Layout, strategy: str, poison: float
) -> None:
    counts = [5] * layout[0]
    fixture = _small(sum(counts), torch.bfloat16)
    num_ranks, options = layout[0] * layout[1], {"experts": strategy}
    clean = processes.run(one_step, num_ranks, layout, fixture, counts, options)
    fixture.hidden_states[-1] = poison
    actual = processes.run(one_step, num_ranks, layout, fixture, counts, options)
    for rank in range(num_ranks):
        num_clean = 4 if rank // layout[1] == layout[0] - 1 else 5
        output = actual[rank]["output"]
        assert torch.equal(output[:num_clean], clean[rank]["output"][:num_clean])
        assert not output[num_clean:].isfinite().any(dim=1).any()


def many_steps(
    worker: Worker,
    layout: Layout,
    fixture: Fixture,
    sequence: Sequence[Sequence[int]],
    repeats: int,
    strategy: str,
) -> tuple[list[Tensor], list[dict[str, int]]]:
    """Outputs of the first round, which all later rounds must repeat, and all counters."""
    layer = _layer(worker, layout, fixture, experts=strategy)
    outputs: list[Tensor] = []
    entered: list[dict[str, int]] = []
    for index in range(repeats * len(sequence)):
        counts = sequence[index % len(sequence)]
        before = layer.collectives.counts.copy()
        output = layer(*_own_rows(fixture, counts, layer.collectives.token_rank), capacity=8)
        entered.append(dict(layer.collectives.counts - before))
        if index < len(sequence):
            outputs.append(output)
        assert torch.equal(output, outputs[index % len(sequence)])
    return outputs, entered


@pytest.mark.parametrize("strategy", ["dense", "ragged"])
@pytest.mark.parametrize(("layout", "repeats"), [((2, 1), 200), ((2, 2), 20), ((4, 1), 20)])
def test_sequence_of_idle_and_busy_ranks(
    processes: ProcessPool, layout: Layout, repeats: int, strategy: str
) -> None:
    """No rank skips a collective; the pool's watchdog turns a hang into a failure."""
    two_ranks = [[8, 8], [5, 0], [0, 5], [0, 0], [1, 7], [0, 1]]
    sequence = [pair * (layout[0] // 2) for pair in two_ranks]
    fixture = _small(8 * layout[0])
    num_ranks = layout[0] * layout[1]
    results = processes.run(many_steps, num_ranks, layout, fixture, sequence, repeats, strategy)
    expected = fixture.routed()
    for rank, (outputs, counters) in enumerate(results):
        token_rank = rank // layout[1]
        for counts, output in zip(sequence, outputs, strict=True):
            assert (output.shape, output.dtype) == ((counts[token_rank], 32), torch.float32)
            own = _by_token_rank(expected[: sum(counts)], counts)[token_rank]
            assert_close(output, own, torch.float32)
        assert counters == [dict(_counts_of_a_step(layout, False))] * (repeats * len(sequence))


def placed_step(worker: Worker, fixture: Fixture, placement: ExpertPlacement) -> Tensor:
    """Two token ranks with two replicas each."""
    groups = worker.layouts[2, 2]
    ours = TorchDistributed(groups.token_group, groups.replica_group)
    local = placement.local(worker.rank)
    linears = linears_of(fixture, local)
    layer = strategy_layer(config_of(fixture), local, linears, ours)
    return layer(*_own_rows(fixture, [5, 5], ours.token_rank), capacity=8)


@pytest.mark.parametrize("num_experts", [16, 30, 3])
def test_round_robin_placement(processes: ProcessPool, num_experts: int) -> None:
    fixture = _small(10, num_experts=num_experts)
    placement = ExpertPlacement.round_robin(num_experts, 4)
    results = processes.run(placed_step, 4, fixture, placement)
    for rank, output in enumerate(results):
        assert_close(output, fixture.routed().split(5)[rank // 2], torch.float32)


def test_redundant_experts(processes: ProcessPool) -> None:
    """A load balancer's physical experts: some experts twice, on different ranks, and each routed
    pair sent to one of the two. To the layer these are 20 experts."""
    logical = _small(10)
    logical.topk_ids[:, 0] = 3
    logical_of = torch.cat([torch.arange(16), torch.tensor([3, 3, 9, 14])])
    moved = torch.randperm(20)
    logical_of = logical_of[moved]
    ids = torch.empty_like(logical.topk_ids)
    for row, row_ids in enumerate(logical.topk_ids.tolist()):
        for slot, expert in enumerate(row_ids):
            copies = (logical_of == expert).nonzero().flatten()
            ids[row, slot] = copies[row % len(copies)]
    assert len(set(ids[:, 0].tolist())) == 3
    physical = replace(
        logical,
        topk_ids=ids,
        w13_weight=logical.w13_weight[logical_of],
        w2_weight=logical.w2_weight[logical_of],
    )
    results = processes.run(placed_step, 4, physical, ExpertPlacement.linear(20, 4))
    for rank, output in enumerate(results):
        assert_close(output, logical.routed().split(5)[rank // 2], torch.float32)


def with_shared(
    worker: Worker,
    layout: Layout,
    fixture: Fixture,
    counts: Sequence[int],
    shared: SharedExpert | None,
    sliced: bool,
) -> tuple[Tensor, bool]:
    layer = _layer(worker, layout, fixture)
    ours = layer.collectives
    if shared is not None and sliced:
        shared = slice_shared_expert(shared, ours.replica_size, ours.replica_rank)
    is_partial = shared is not None and shared.is_partial
    rows = _own_rows(fixture, counts, ours.token_rank)
    capacity = max(*counts, 1)
    return layer(*rows, capacity=capacity, shared=shared, shared_is_partial=is_partial), is_partial


@pytest.mark.parametrize("layout", [(1, 1), *LAYOUTS], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts_are_added_once(
    processes: ProcessPool, layout: Layout, sliced: bool, num_shared: int, dtype: torch.dtype
) -> None:
    counts = UNEVEN[: layout[0]]
    fixture = _small(sum(counts), dtype)
    width = 128 * num_shared
    w13 = (torch.randn(2 * width, 32) / 32**0.5).to(dtype)
    w2 = (torch.randn(32, width) / max(width, 1) ** 0.5).to(dtype)
    shared = SharedExpert(w13, w2) if num_shared else None
    expected = fixture.routed()
    if num_shared:
        expected = expected + shared_expert(fixture.hidden_states, w13, w2)
    num_ranks = layout[0] * layout[1]
    results = processes.run(with_shared, num_ranks, layout, fixture, counts, shared, sliced)
    for rank, (output, is_partial) in enumerate(results):
        assert is_partial == (sliced and layout[1] > 1 and num_shared > 0)
        assert_close(output, _by_token_rank(expected, counts)[rank // layout[1]], dtype)


@each_layout
def test_grouped_overflow_on_one_rank(processes: ProcessPool, layout: Layout) -> None:
    """Every rank reruns, also those whose own experts did not overflow."""
    counts = [6] * layout[0]
    fixture = _small(sum(counts))
    fixture.topk_ids[:] = torch.arange(sum(counts))[:, None] % 2 * 4 + torch.arange(4)
    fixture.topk_ids[:, 0] = 15
    num_ranks = layout[0] * layout[1]
    options = {"experts": "grouped", "expert_capacity": 5}
    results = processes.run(one_step, num_ranks, layout, fixture, counts, options)
    expected = _by_token_rank(fixture.routed(), counts)
    grouped, dense = (_counts_of_a_step(layout, flag) for flag in (True, False))
    for rank, result in enumerate(results):
        assert_close(result["output"], expected[rank // layout[1]], torch.float32)
        assert result["counts"] == grouped + dense


def at_capacity(
    worker: Worker, layout: Layout, fixture: Fixture, capacity: int
) -> tuple[Tensor, str, dict[str, int]]:
    layer = _layer(worker, layout, fixture)
    counts = [capacity] * layout[0]
    rows = _own_rows(fixture, counts, layer.collectives.token_rank)
    output = layer(*rows, capacity=capacity)
    before = layer.collectives.counts.copy()
    try:
        layer(*rows, capacity=capacity - 1)
    except ValueError as error:
        return output, str(error), dict(layer.collectives.counts - before)
    return output, "", {}


def test_gathered_rows_may_exceed_the_capacity_of_a_rank(processes: ProcessPool) -> None:
    fixture = _small(4 * 64)
    results = processes.run(at_capacity, 4, (4, 1), fixture, 64)
    expected = fixture.routed().split(64)
    for rank, (output, error, counts_after_error) in enumerate(results):
        assert_close(output, expected[rank], torch.float32)
        assert "64 tokens" in error and "capacity is 63" in error
        assert counts_after_error == {}


def compiled_step(
    worker: Worker, layout: Layout, fixture: Fixture, strategy: str, gather: str
) -> tuple[Tensor, Tensor]:
    layer = _layer(
        worker,
        layout,
        fixture,
        host_mode=False,
        experts=strategy,
        gather=gather,
        expert_capacity=20,
    )
    rows = _own_rows(fixture, [5] * layout[0], layer.collectives.token_rank)

    def step(hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return layer.step(hidden_states, topk_ids, topk_weights, capacity=8).hidden_states

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    return compiled(*rows), step(*rows)


@pytest.mark.parametrize(
    ("layout", "strategy", "gather"),
    [((2, 1), "dense", "bytes"), ((1, 2), "gated", "fp32"), ((2, 1), "grouped", "fp32")],
)
def test_a_step_with_collectives_is_one_graph(
    processes: ProcessPool, layout: Layout, strategy: str, gather: str
) -> None:
    fixture = _small(5 * layout[0])
    results = processes.run(compiled_step, 2, layout, fixture, strategy, gather)
    expected = fixture.routed().split(5)
    for rank, (compiled, eager) in enumerate(results):
        assert_close(compiled, expected[rank // layout[1]], torch.float32)
        assert_close(eager, expected[rank // layout[1]], torch.float32)
