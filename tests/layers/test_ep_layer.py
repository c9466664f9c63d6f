"""The whole layer in one process."""

import logging
from dataclasses import replace

import pytest
import torch
from layer_factory import STRATEGIES, config_of, layer_of, linears_of, local_of
from oracle import Fixture, assert_close, make_fixture, shared_expert
from torch import Tensor

from vllm_moe_ep.collectives import SingleProcess
from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep.layers import shared_expert as shared_expert_module
from vllm_moe_ep.layers import strategy_experts
from vllm_moe_ep.layers.ep_layer import EPLayer
from vllm_moe_ep.layers.expert_weights import FloatExperts
from vllm_moe_ep.layers.shared_expert import SharedExpert, prepare_shared
from vllm_moe_ep.layers.strategy_experts import strategy_layer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _ep_config(strategy: str, expert_capacity: int = 512) -> EPConfig:
    return EPConfig(experts=strategy, expert_capacity=expert_capacity)


def _small(num_tokens: int, dtype: torch.dtype = torch.float32, top_k: int = 4) -> Fixture:
    return make_fixture(dtype, num_tokens, hidden_size=16, moe_intermediate_size=8, top_k=top_k)


def _output(layer: EPLayer, fixture: Fixture, **options: object) -> Tensor:
    options = {"capacity": len(fixture.hidden_states), **options}
    return layer(
        fixture.hidden_states,
        fixture.topk_ids,
        fixture.topk_weights,
        **options,  # type: ignore[arg-type]
    )


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
def test_fixture_s(strategy: str, dtype: torch.dtype) -> None:
    fixture = make_fixture(dtype)
    layer = layer_of(fixture, _ep_config(strategy))
    expected = fixture.routed()
    actual = _output(layer, fixture)
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype)


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 8])
def test_no_tokens_then_one(strategy: str, dtype: torch.dtype, top_k: int) -> None:
    fixture = _small(1, dtype, top_k)
    layer = layer_of(fixture, _ep_config(strategy))
    w13, w2 = fixture.w13_weight[0], fixture.w2_weight[0]
    shared = SharedExpert(w13, w2)
    none = layer(
        fixture.hidden_states[:0],
        fixture.topk_ids[:0],
        fixture.topk_weights[:0],
        capacity=4,
        shared=shared,
    )
    assert (none.shape, none.dtype) == ((0, 16), dtype)
    one = layer(
        fixture.hidden_states, fixture.topk_ids, fixture.topk_weights, capacity=4, shared=shared
    )
    expected = fixture.routed() + shared_expert(fixture.hidden_states, w13, w2)
    assert_close(one, expected, dtype)


@each_strategy
def test_valid_mask_disagrees_with_the_ids(strategy: str) -> None:
    """Rows are dropped when either says so."""
    fixture = _small(8)
    fixture.topk_ids[2] = -1
    valid = torch.tensor([True, True, True, False, True, False, True, True])
    layer = layer_of(fixture, _ep_config(strategy))
    actual = _output(layer, fixture, valid=valid)
    expected = fixture.routed()
    expected[[3, 5]] = 0
    assert_close(actual, expected, torch.float32)
    assert torch.equal(actual[[2, 3, 5]], torch.zeros(3, 16))


def test_valid_mask_on_unsigned_ids() -> None:
    fixture = _small(2)
    unsigned = replace(fixture, topk_ids=fixture.topk_ids.to(torch.uint32))
    actual = _output(layer_of(fixture), unsigned, valid=torch.tensor([True, False]))
    assert_close(actual[:1], fixture.routed()[:1], torch.float32)
    assert torch.equal(actual[1], torch.zeros(16))


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_shared_expert_is_added_once(strategy: str, dtype: torch.dtype, as_tensor: bool) -> None:
    fixture = make_fixture(dtype, 8)
    w13, w2 = (torch.randn(256, 256) / 16).to(dtype), (torch.randn(256, 128) / 11).to(dtype)
    shared = SharedExpert(w13, w2)
    expected = fixture.routed() + shared_expert(fixture.hidden_states, w13, w2)
    for is_partial in (False, True):
        actual = layer_of(fixture, _ep_config(strategy))(
            fixture.hidden_states,
            fixture.topk_ids,
            fixture.topk_weights,
            capacity=8,
            shared=shared(fixture.hidden_states) if as_tensor else shared,
            shared_is_partial=is_partial,
        )
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)


def test_grouped_reruns_dense_after_an_overflow() -> None:
    fixture = _small(12)
    fixture.topk_ids[:, 0] = 7
    layer = layer_of(fixture, _ep_config("grouped", expert_capacity=3))
    arguments = (fixture.hidden_states, fixture.topk_ids, fixture.topk_weights)
    step = layer.step(*arguments, capacity=12)
    assert step.overflow is not None and step.overflow.tolist() == [1]
    assert_close(layer(*arguments, capacity=12), fixture.routed(), torch.float32)


def test_weights_are_held_by_reference() -> None:
    fixture = _small(4)
    local = local_of(fixture, 1, 0)
    linears = FloatExperts(fixture.w13_weight, fixture.w2_weight, config_of(fixture))
    layer = strategy_layer(config_of(fixture), local, linears, SingleProcess())
    _output(layer, fixture)
    fixture.w13_weight.mul_(-0.5)
    fixture.w2_weight.data = fixture.w2_weight * 3
    assert_close(_output(layer, fixture), fixture.routed(), torch.float32)


@pytest.mark.parametrize("num_tokens", [33, 256])
def test_too_many_tokens(num_tokens: int) -> None:
    """Nothing is sized by a maximum: the largest capacity works, one row more says so."""
    fixture = _small(num_tokens)
    layer = layer_of(fixture, max_num_tokens=num_tokens)
    assert_close(_output(layer, fixture), fixture.routed(), torch.float32)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens, .* capacity is {num_tokens - 1}"):
        _output(layer, fixture, capacity=num_tokens - 1)
    with pytest.raises(ValueError, match=f"{num_tokens + 1} rows, .* set up for {num_tokens}"):
        _output(layer, fixture, capacity=num_tokens + 1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden_states": torch.zeros(4, 8)}, r"hidden_states must be \[4, 16\], found \[4, 8\]"),
        ({"topk_ids": torch.zeros(4, 3).int()}, r"topk_ids must be \[4, 4\], found \[4, 3\]"),
        ({"topk_weights": torch.zeros(3, 4)}, r"topk_weights must be \[4, 4\], found \[3, 4\]"),
        ({"hidden_states": torch.zeros(4, 16).half()}, "torch.float32, .* found torch.float16"),
        ({"topk_ids": torch.zeros(4, 4)}, "topk_ids must be integers, found torch.float32"),
        ({"topk_ids": torch.zeros(4, 4).bool()}, "topk_ids must be integers, found torch.bool"),
        ({"topk_weights": torch.zeros(4, 4).int()}, "must be floats, found torch.int32"),
    ],
)
def test_refused_inputs(change: dict[str, Tensor], text: str) -> None:
    fixture = _small(4)
    layer = layer_of(fixture)
    with pytest.raises(ValueError, match=text):
        _output(layer, replace(fixture, **change), capacity=4)


def test_refused_weights() -> None:
    fixture = _small(4)
    config = config_of(fixture)
    w13, w2 = fixture.w13_weight, fixture.w2_weight
    with pytest.raises(ValueError, match=r"w13_weight must be \[num_local_experts, 16, 16\]"):
        FloatExperts(w13[:, :8], w2, config)
    with pytest.raises(ValueError, match=r"w2_weight must be .*, found \[16, 8\]"):
        FloatExperts(w13, w2[0], config)
    with pytest.raises(ValueError, match="holds 16 experts and w2_weight 15"):
        FloatExperts(w13, w2[:15], config)
    with pytest.raises(UnsupportedError, match="float64"):
        FloatExperts(w13.double(), w2.double(), config)
    with pytest.raises(UnsupportedError, match="w2_weight torch.float16"):
        FloatExperts(w13, w2.half(), config)
    other = local_of(make_fixture(num_tokens=1, num_experts=8), 1, 0)
    with pytest.raises(ValueError, match="of 8 experts, but the config has 16"):
        strategy_layer(config, other, linears_of(fixture, other), SingleProcess())


@pytest.mark.parametrize("forced_gate", [0, 1])
def test_forced_gate_warns(forced_gate: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once, however many layers there are."""
    fixture = _small(4)
    strategy_experts._warn_of_forced_gate.cache_clear()
    with caplog.at_level(logging.WARNING):
        layer_of(fixture, EPConfig(experts="gated", forced_gate=forced_gate))
        layer = layer_of(fixture, EPConfig(experts="gated", forced_gate=forced_gate))
    (record,) = caplog.records
    said = record.getMessage()
    assert f"forced to {forced_gate}" in said and "results are wrong" in said
    actual = _output(layer, fixture)
    if forced_gate:
        assert_close(actual, fixture.routed(), torch.float32)
    else:
        assert torch.equal(actual, torch.zeros(4, 16))


def test_nothing_is_logged_without_a_forced_gate(caplog: pytest.LogCaptureFixture) -> None:
    layer_of(_small(4), EPConfig(experts="gated"))
    assert not caplog.records


class Replicas(SingleProcess):
    """One of several ranks that hold the same tokens."""

    def __init__(self, replica_size: int, replica_rank: int) -> None:
        super().__init__()
        self.replica_size, self.replica_rank = replica_size, replica_rank


@pytest.mark.parametrize(
    ("width", "replica_size", "is_enabled", "reason"),
    [
        (256, 4, True, None),
        (256, 4, False, "switched off"),
        (192, 4, True, "width 192 is not a multiple of 128"),
        (256, 1, True, "there is one rank"),
        (512, 2, True, "more than the 2 ranks"),
    ],
)
def test_shared_expert_is_sliced_or_the_log_says_why_not(
    width: int,
    replica_size: int,
    is_enabled: bool,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = _small(4)
    whole = SharedExpert(torch.randn(2 * width, 16), torch.randn(16, width))
    shared_expert_module._log_whole_shared_expert.cache_clear()
    parts = []
    with caplog.at_level(logging.INFO):
        for rank in range(replica_size):
            parts.append(prepare_shared(whole, Replicas(replica_size, rank), is_enabled))
    assert all(part.is_partial == (reason is None) for part in parts)
    if reason is None:
        outputs = [part(fixture.hidden_states) for part in parts]
        expected = shared_expert(fixture.hidden_states, whole.w13_weight, whole.w2_weight)
        assert_close(sum(outputs, torch.zeros(4, 16)), expected, torch.float32)
        assert not caplog.records
    else:
        assert all(part is whole for part in parts)
        (record,) = caplog.records
        assert reason in record.getMessage()
