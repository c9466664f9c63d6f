"""One decode step of vllm-neuron's MoE: one sum over all EP ranks, shared slices included."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_runner import ACTIVATION
from oracle import Fixture, make_fixture, rel_l2
from process_pool import ProcessPool, Worker
from quantised_factory import cast_of
from torch import Tensor
from vllm_neuron_stand_in import affinities_of, exact_shared, exact_weights, make_module

from vllm_moe_ep.adapters.neuron.ep_sum import two_step_sum
from vllm_moe_ep.adapters.neuron.moe_step import prepare_shared_slice, swap_step, swapped_steps
from vllm_moe_ep.adapters.neuron.routed_experts import prepare_experts, swap_routed_experts
from vllm_moe_ep.errors import UnsupportedError

HIDDEN, WIDTH, NUM_EXPERTS, NUM_ROWS, NUM_RANKS, NUM_SLICES = 256, 256, 8, 5, 4, 2
CONFIG = SimpleNamespace(
    n_routed_experts=NUM_EXPERTS,
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    swiglu_limit=0.8,
)


class Recorder:
    """An EP group that keeps what each rank sends, and returns it unsummed."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_reduce(self, values: Tensor) -> Tensor:
        self.sent.append(values)
        return values


def make_ranks(group: Recorder) -> list[Any]:
    """The MoE modules of four ranks, two of which hold each slice of the shared expert."""
    module = make_module()
    swap_routed_experts(module)
    assert swap_step(module) is None and swap_step(module) is None
    slices = [module.DeepseekV4SharedExpert(CONFIG, NUM_SLICES) for _ in range(NUM_SLICES)]
    ranks = []
    for rank in range(NUM_RANKS):
        experts = module.DeepseekV4RoutedExperts(
            CONFIG, 0, ep_degree=NUM_RANKS, ep_rank=rank, ep_group=group
        )
        experts.set_random_weights()
        ranks.append(module.DeepseekV4MoE(experts, slices[rank % NUM_SLICES]))
    return ranks


def test_one_sum_gives_routed_and_shared() -> None:
    group = Recorder()
    ranks = make_ranks(group)
    fixture = make_fixture(torch.bfloat16, NUM_ROWS, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    affinities = affinities_of(fixture, NUM_EXPERTS)
    assert swapped_steps(ranks[0]) == {"": ranks[0]}
    for moe in ranks:
        assert (moe(fixture.hidden_states, affinities, False) == 10).all(), "not prepared yet"
    group.sent.clear()
    for moe in ranks:
        prepare_experts(moe.experts)
        assert prepare_shared_slice(moe) is None
        moe(fixture.hidden_states, affinities, False)
        assert (moe(fixture.hidden_states, affinities, True) == 10).all(), "a prompt"
    assert len(group.sent) == NUM_RANKS and group.sent[0].dtype is torch.float32
    weights = [exact_weights(moe.experts) for moe in ranks]
    w13, w2 = (torch.cat([each[place] for each in weights]) for place in range(2))
    parts = fixture.hidden_states, fixture.topk_ids, fixture.topk_weights
    expected = Fixture(*parts, w13, w2).routed(0.8, cast_of(ACTIVATION))
    slices = [moe.shared_expert for moe in ranks[:NUM_SLICES]]
    shared = exact_shared(slices, fixture.hidden_states, 0.8, cast_of(ACTIVATION))
    assert rel_l2(sum(group.sent), expected + shared) <= 1e-2
    assert shared.norm() > 0.1 * expected.norm()


def test_new_weights_reach_the_slice() -> None:
    moe = make_ranks(Recorder())[0]
    assert prepare_shared_slice(moe) is None
    rows = torch.randn(NUM_ROWS, HIDDEN)
    before = moe.moe_ep_shared_slice(rows)
    moe.shared_expert.set_random_weights()
    assert prepare_shared_slice(moe) is None
    assert rel_l2(moe.moe_ep_shared_slice(rows), before) > 0.1
    moe.shared_expert.w1_weight.data.view(torch.uint8)[0, 0] = 0x7A
    with pytest.raises(UnsupportedError, match="codes above 240"):
        prepare_shared_slice(moe)


def test_without_a_slice_the_shared_expert_stays_their_own() -> None:
    group = Recorder()
    moe = make_ranks(group)[0]
    prepare_experts(moe.experts)
    moe.shared_expert.shared_group_size = 3
    assert prepare_shared_slice(moe) == "its 3 slices do not divide 4 EP ranks"
    fixture = make_fixture(torch.bfloat16, NUM_ROWS, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    output = moe(fixture.hidden_states, affinities_of(fixture, NUM_EXPERTS), False)
    torch.testing.assert_close(output, (group.sent[-1] + 3).to(torch.bfloat16))
    del moe.shared_expert.w3_scale
    assert "no w3_scale" in str(prepare_shared_slice(moe))


def test_other_interfaces_are_left_alone() -> None:
    module = make_module()
    module.DeepseekV4MoE.forward = lambda self, hidden_states: hidden_states
    assert "forward takes self, hidden_states, not" in str(swap_step(module))
    del module.DeepseekV4MoE
    assert "no class DeepseekV4MoE" in str(swap_step(module))


def sum_in_two_steps(worker: Worker) -> None:
    group = SimpleNamespace(device_group=dist.group.WORLD)
    total = two_step_sum(group, 2)
    assert callable(total)
    assert total(torch.full((3, 5), 10.0**worker.rank)).eq(1111).all()
    assert two_step_sum(group, 4) == "4 ranks share one device of 4"
    assert "switched off" in str(two_step_sum(group, 2, is_enabled=False))


def test_the_sum_in_two_steps(processes: ProcessPool) -> None:
    processes.run(sum_in_two_steps, 4)
