"""vllm-neuron's routed experts, by a stand-in with the interface of its public sources."""

from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_runner import ACTIVATION
from oracle import Fixture, make_fixture, rel_l2
from quantised_factory import cast_of
from torch import Tensor, nn

from vllm_moe_ep.adapters.neuron.routed_experts import prepare_model, swap_routed_experts
from vllm_moe_ep.errors import UnsupportedError

HIDDEN, WIDTH, NUM_EXPERTS = 256, 256, 4


class Group:
    """Two ranks: adds what the other one is known to send."""

    def __init__(self) -> None:
        self.other = torch.zeros(1)
        self.calls = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return tensor + self.other


def make_module() -> ModuleType:
    """A module with a fresh class, since swapping changes it."""

    class DeepseekV4RoutedExperts(nn.Module):
        def __init__(self, ep_rank: int, ep_group: Group | None) -> None:
            super().__init__()
            self.ep_degree, self.ep_group = 2, ep_group
            self.num_local_experts = NUM_EXPERTS // 2
            self.swiglu_limit = 0.8
            rank = torch.tensor([[ep_rank]], dtype=torch.int32)
            self.register_buffer("ep_rank_buf", rank, persistent=False)
            for name, (k, n) in {
                "w1": (HIDDEN, WIDTH),
                "w3": (HIDDEN, WIDTH),
                "w2": (WIDTH, HIDDEN),
            }.items():
                codes = torch.randint(0, 256, (self.num_local_experts, k, n), dtype=torch.uint8)
                codes[codes & 0x7F >= 0x78] = 0x38
                weight = codes.view(torch.float8_e4m3fn)
                scale = torch.exp2(torch.randint(-13, -9, (self.num_local_experts, n)).float())
                setattr(self, f"{name}_weight", nn.Parameter(weight, requires_grad=False))
                setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

        def forward(
            self,
            hidden_states: Tensor,
            expert_affinities: Tensor,
            expert_index: Tensor,
            is_prefill: bool,
        ) -> Tensor:
            return torch.full_like(hidden_states, 7.0)

    module = ModuleType("vllm_neuron.model.deepseek_v4.moe")
    module.DeepseekV4RoutedExperts = DeepseekV4RoutedExperts  # type: ignore[attr-defined]
    return module


def exact_weights(experts: Any) -> tuple[Tensor, Tensor]:
    """fp64 gate above up, and down, of the local experts."""
    w1, w2, w3 = (
        (
            getattr(experts, f"{name}_weight").double() * getattr(experts, f"{name}_scale")[:, None]
        ).transpose(1, 2)
        for name in ("w1", "w2", "w3")
    )
    return torch.cat([w1, w3], dim=1), w2


def affinities_of(fixture: Fixture) -> Tensor:
    dense = torch.zeros(len(fixture.topk_ids), NUM_EXPERTS)
    return dense.scatter_(1, fixture.topk_ids.long(), fixture.topk_weights)


@pytest.mark.parametrize("ep_rank", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_decode_takes_the_kernel(ep_rank: int, num_rows: int) -> None:
    module, group = make_module(), Group()
    swap_routed_experts(module)
    swap_routed_experts(module)
    experts = module.DeepseekV4RoutedExperts(ep_rank, group)
    model = nn.Sequential(nn.Identity(), experts)
    assert prepare_model(model) == 1
    fixture = make_fixture(torch.bfloat16, num_rows, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    w13, w2 = exact_weights(experts)
    first = ep_rank * 2
    local = Fixture(fixture.hidden_states, fixture.topk_ids - first, fixture.topk_weights, w13, w2)
    group.other = torch.randn(num_rows, HIDDEN)
    actual = experts(
        fixture.hidden_states, affinities_of(fixture), fixture.topk_ids, is_prefill=False
    )
    expected = local.routed(0.8, cast_of(ACTIVATION)) + group.other
    assert actual.dtype is torch.bfloat16 and group.calls == 1
    assert rel_l2(actual, expected) <= 1e-2


def test_all_else_takes_the_original() -> None:
    module = make_module()
    swap_routed_experts(module)
    experts = module.DeepseekV4RoutedExperts(0, None)
    fixture = make_fixture(torch.bfloat16, 4, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    arguments = (fixture.hidden_states, affinities_of(fixture), fixture.topk_ids)
    assert (experts(*arguments, False) == 7).all(), "weights are not prepared yet"
    prepare_model(experts)
    assert (experts(*arguments, True) == 7).all(), "a prompt"
    many = [part.repeat(40, 1) for part in arguments]
    assert (experts(*many, False) == 7).all(), "more rows than the kernel takes"
    assert not (experts(*arguments, False) == 7).any()


def test_other_interfaces_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no class DeepseekV4RoutedExperts"):
        swap_routed_experts(ModuleType("vllm_neuron.model.deepseek_v4.moe"))
    module = make_module()
    module.DeepseekV4RoutedExperts.forward = lambda self, hidden_states: hidden_states
    with pytest.raises(UnsupportedError, match="forward takes self, hidden_states; this adapter"):
        swap_routed_experts(module)


def test_codes_beyond_240_are_refused() -> None:
    module = make_module()
    swap_routed_experts(module)
    experts = module.DeepseekV4RoutedExperts(0, None)
    experts.w2_weight.data.view(torch.uint8)[1, 3, 5] = 0x7A
    with pytest.raises(UnsupportedError, match="codes above 240"):
        prepare_model(experts)
