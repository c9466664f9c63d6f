"""vllm-neuron's routed experts, by a stand-in with the interface of its public sources."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_runner import ACTIVATION
from oracle import Fixture, make_fixture, rel_l2
from quantised_factory import cast_of
from torch import Tensor, nn
from vllm_neuron_stand_in import affinities_of, exact_weights, make_module

from vllm_moe_ep.adapters.neuron.expert_weights import refusal
from vllm_moe_ep.adapters.neuron.routed_experts import (
    is_prepared,
    prepare_experts,
    swap_routed_experts,
    swapped_modules,
)
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


def make_experts(module: ModuleType, ep_rank: int = 0, ep_group: Group | None = None) -> Any:
    config = SimpleNamespace(
        n_routed_experts=NUM_EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        swiglu_limit=0.8,
    )
    experts = module.DeepseekV4RoutedExperts(config, 0, ep_rank=ep_rank, ep_group=ep_group)
    experts.set_random_weights()
    return experts


def _parameter(k: int, n: int, is_fp8: bool = False) -> nn.Parameter:
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    return nn.Parameter(torch.empty(2, k, n, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("ep_rank", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_decode_takes_the_kernel(ep_rank: int, num_rows: int) -> None:
    module, group = make_module(), Group()
    swap_routed_experts(module)
    swap_routed_experts(module)
    experts = make_experts(module, ep_rank, group)
    model = nn.Sequential(nn.Identity(), experts)
    assert swapped_modules(model) == {"1": experts} and not is_prepared(experts)
    prepare_experts(experts)
    assert is_prepared(experts)
    fixture = make_fixture(torch.bfloat16, num_rows, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    w13, w2 = exact_weights(experts)
    first = ep_rank * 2
    local = Fixture(fixture.hidden_states, fixture.topk_ids - first, fixture.topk_weights, w13, w2)
    group.other = torch.randn(num_rows, HIDDEN)
    affinities = affinities_of(fixture, NUM_EXPERTS)
    actual = experts(fixture.hidden_states, affinities, fixture.topk_ids, is_prefill=False)
    expected = local.routed(0.8, cast_of(ACTIVATION)) + group.other
    assert actual.dtype is torch.bfloat16 and group.calls == 1
    assert rel_l2(actual, expected) <= 1e-2


def test_all_else_takes_the_original() -> None:
    module = make_module()
    swap_routed_experts(module)
    experts = make_experts(module)
    fixture = make_fixture(torch.bfloat16, 4, HIDDEN, WIDTH, NUM_EXPERTS, 2)
    arguments = (fixture.hidden_states, affinities_of(fixture, NUM_EXPERTS), fixture.topk_ids)
    assert (experts(*arguments, False) == 7).all(), "weights are not prepared yet"
    prepare_experts(experts)
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
    experts = make_experts(module)
    experts.w2_weight.data.view(torch.uint8)[1, 3, 5] = 0x7A
    with pytest.raises(UnsupportedError, match="codes above 240"):
        prepare_experts(experts)


@pytest.mark.parametrize(("name", "tensor"), [("w3", "w1_weight followed by"), ("w2", "w2_weight")])
def test_scales_that_are_no_numbers_are_refused(name: str, tensor: str) -> None:
    experts = make_experts(make_module())
    getattr(experts, f"{name}_scale").data[1, 3] = torch.nan
    with pytest.raises(UnsupportedError, match=f"of {tensor}.* is nan, not a finite number"):
        prepare_experts(experts)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda experts: delattr(experts, "w3_scale"), "no w3_scale"),
        (lambda experts: delattr(experts, "ep_rank_buf"), "no ep_rank_buf"),
        (lambda experts: setattr(experts, "w2_weight", _parameter(256, 256)), "w2_weight is torch"),
        (lambda experts: setattr(experts, "w1_weight", _parameter(200, 256, True)), "512 x 200"),
        (lambda experts: setattr(experts, "w1_weight", _parameter(256, 128, True)), "1 blocks"),
    ],
)
def test_refusals_by_shape(change: Callable[[Any], None], reason: str) -> None:
    experts = make_experts(make_module())
    assert refusal(experts) is None
    change(experts)
    found = refusal(experts)
    assert found is not None and reason in found
