"""The shared expert once per token, whatever the sum over ranks is made of."""

from functools import cache

import pytest
import torch
from layer_factory import layer_of
from oracle import Fixture, assert_close, make_fixture, shared_expert
from process_pool import ProcessPool, Worker
from torch import Tensor

from vllm_moe_ep.collectives import TorchDistributed
from vllm_moe_ep.device_groups import DeviceGroups, make_device_groups
from vllm_moe_ep.layers.shared_expert import SharedExpert, prepare_shared

ROWS = 4


@cache
def _device_groups() -> DeviceGroups:
    world = torch.distributed.group.WORLD
    assert world is not None
    return make_device_groups(world, 2)


def one_step(
    worker: Worker,
    layout: tuple[int, int],
    combine: str,
    fixture: Fixture,
    whole: SharedExpert,
    is_sliced: bool,
) -> tuple[Tensor, bool]:
    groups = worker.layouts[layout]
    collectives = TorchDistributed(
        groups.token_group,
        groups.replica_group,
        use_reduce_scatter=combine == "reduce-scatter",
        device_groups=_device_groups() if combine == "in devices" else None,
    )
    layer = layer_of(fixture, collectives=collectives)
    shared = prepare_shared(whole, collectives, is_sliced)
    own = slice(ROWS * collectives.token_rank, ROWS * (collectives.token_rank + 1))
    rows = fixture.hidden_states[own], fixture.topk_ids[own], fixture.topk_weights[own]
    output = layer(*rows, capacity=ROWS, shared=shared, shared_is_partial=shared.is_partial)
    return output, shared.is_partial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_sliced", [False, True], ids=["whole", "sliced"])
@pytest.mark.parametrize(
    ("layout", "combine"),
    [
        ((1, 1), "all-reduce"),
        ((1, 2), "all-reduce"),
        ((1, 4), "all-reduce"),
        ((1, 4), "in devices"),
        ((2, 1), "reduce-scatter"),
        ((4, 1), "reduce-scatter"),
        ((4, 1), "all-reduce"),
        ((2, 2), "reduce-scatter"),
    ],
    ids=str,
)
def test_routed_and_shared_add_up(
    processes: ProcessPool,
    layout: tuple[int, int],
    combine: str,
    is_sliced: bool,
    dtype: torch.dtype,
) -> None:
    """Each token rank holds rows of its own, as chunks of one sequence would be."""
    fixture = make_fixture(dtype, ROWS * layout[0], hidden_size=64, moe_intermediate_size=32)
    w13, w2 = (torch.randn(256, 64) / 8).to(dtype), (torch.randn(64, 128) / 11).to(dtype)
    num_ranks, whole = layout[0] * layout[1], SharedExpert(w13, w2)
    arguments = (layout, combine, fixture, whole, is_sliced)
    results = processes.run(one_step, num_ranks, *arguments)
    expected = fixture.routed() + shared_expert(fixture.hidden_states, w13, w2)
    for rank, (output, is_partial) in enumerate(results):
        assert is_partial == (is_sliced and layout[1] > 1)
        assert_close(output, expected.split(ROWS)[rank // layout[1]], dtype)
