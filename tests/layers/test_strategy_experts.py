"""Every expert strategy against the oracle, and the choice between them."""

from dataclasses import replace

import pytest
import torch
from layer_factory import STRATEGIES, config_of, linears_of, local_of, shard_of, tokens_of
from oracle import Fixture, assert_close, make_fixture
from torch import Tensor

from vllm_moe_ep.config import EPConfig
from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.layers.expert_weights import FloatExperts
from vllm_moe_ep.layers.row_parts import FEWEST_ROWS
from vllm_moe_ep.layers.strategy_experts import automatic_capacity, choose_strategy, run_experts
from vllm_moe_ep.placement import LocalExperts

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# As many rows as there are: no expert can overflow.
EP_CONFIG = EPConfig(expert_capacity=64)
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def _run(strategy: str, fixture: Fixture, shard: ExpertShard) -> Tensor:
    output = run_experts(strategy, tokens_of(fixture), shard, EP_CONFIG)
    assert output.values.dtype == torch.float32
    assert (output.overflow is None) == (strategy != "grouped")
    assert output.overflow is None or output.overflow.tolist() == [0]
    return output.values


def _run_all_ranks(strategy: str, fixture: Fixture, ep_size: int) -> Tensor:
    return sum(
        (_run(strategy, fixture, shard_of(fixture, ep_size, rank)) for rank in range(ep_size)),
        start=torch.zeros(fixture.hidden_states.shape),
    )


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64])
def test_sum_over_ranks_equals_the_oracle(
    strategy: str, dtype: torch.dtype, num_tokens: int
) -> None:
    fixture = make_fixture(dtype, num_tokens)
    assert_close(_run_all_ranks(strategy, fixture, 4), fixture.routed(), dtype)


@each_strategy
@pytest.mark.parametrize("num_tokens", [FEWEST_ROWS, FEWEST_ROWS + 1, 3 * FEWEST_ROWS + 17])
def test_rows_of_several_parts(strategy: str, num_tokens: int) -> None:
    """One expert has every row but one; the first and the last rows of parts are as the others."""
    fixture = _small_fixture(num_tokens)
    fixture.topk_ids[:, 1] = 3
    fixture.topk_ids[0] = -1
    output = run_experts(
        strategy,
        tokens_of(fixture),
        shard_of(fixture),
        EPConfig(expert_capacity=num_tokens - 1),
    )
    assert output.overflow is None or output.overflow.tolist() == [0]
    for part in (slice(None), slice(FEWEST_ROWS - 1, FEWEST_ROWS + 1), slice(-1, None)):
        assert_close(output.values[part], fixture.routed()[part], torch.float32)


@each_strategy
@pytest.mark.parametrize("limit", [0.05, 0.7])
def test_clamp(strategy: str, limit: float) -> None:
    fixture = make_fixture(torch.bfloat16, 9)
    actual = _run(strategy, fixture, shard_of(fixture, limit=limit))
    assert_close(actual, fixture.routed(limit), torch.bfloat16)


@each_strategy
@pytest.mark.parametrize("num_experts", [30, 5])
@pytest.mark.parametrize("ep_size", [1, 3, 8])
def test_uneven_placements_compute_each_expert_once(
    strategy: str, num_experts: int, ep_size: int
) -> None:
    fixture = make_fixture(
        num_tokens=40, hidden_size=16, moe_intermediate_size=8, num_experts=num_experts, top_k=1
    )
    every_expert = torch.arange(40).remainder(num_experts).int()[:, None]
    fixture = replace(fixture, topk_ids=every_expert)
    assert_close(_run_all_ranks(strategy, fixture, ep_size), fixture.routed(), torch.float32)


@each_strategy
def test_slots_in_any_order(strategy: str) -> None:
    fixture = _small_fixture()
    local = LocalExperts(16, (9, 2, 15))
    shard = ExpertShard(local, linears_of(fixture, local), None)
    foreign = [expert for expert in range(16) if expert not in local.global_ids]
    only_local = replace(
        fixture, w2_weight=fixture.w2_weight.index_fill(0, torch.tensor(foreign), 0)
    )
    assert_close(_run(strategy, fixture, shard), only_local.routed(), torch.float32)


@each_strategy
@pytest.mark.parametrize("num_local", [3, 0])
def test_unused_slots_never_contribute(strategy: str, num_local: int) -> None:
    """Trailing slots full of NaN, and ids that could be mistaken for theirs."""
    fixture = _small_fixture()
    fixture.topk_ids[0] = torch.tensor([-2, 16, 17, -(2**31)])
    local = LocalExperts(16, tuple(range(num_local)))
    weights = (fixture.w13_weight[:5].clone(), fixture.w2_weight[:5].clone())
    for weight in weights:
        weight[num_local:] = torch.nan
    shard = ExpertShard(local, FloatExperts(*weights, config_of(fixture)), None)
    foreign = fixture.topk_ids >= num_local
    only_local = replace(fixture, topk_ids=fixture.topk_ids.masked_fill(foreign, -1))
    actual = _run(strategy, fixture, shard)
    assert torch.equal(actual[0], torch.zeros(16))
    if num_local:
        assert_close(actual, only_local.routed(), torch.float32)
    else:
        assert torch.equal(actual, torch.zeros(fixture.hidden_states.shape))


def test_more_local_experts_than_slots() -> None:
    fixture = _small_fixture()
    weights = FloatExperts(fixture.w13_weight[:3], fixture.w2_weight[:3], config_of(fixture))
    with pytest.raises(ValueError, match="hold 3 experts, .* 4"):
        ExpertShard(local_of(fixture, 4, 0), weights, None)


@each_strategy
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint32])
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_id_dtypes_and_strides(strategy: str, dtype: torch.dtype, num_tokens: int) -> None:
    fixture = _small_fixture(num_tokens)
    expected = fixture.routed()
    step_two = torch.full((num_tokens, 8), 3, dtype=dtype)
    step_two[:, ::2] = fixture.topk_ids.to(dtype)
    transposed = fixture.topk_ids.t().contiguous().to(dtype).t()
    for ids in (step_two[:, ::2], transposed):
        actual = _run(strategy, replace(fixture, topk_ids=ids), shard_of(fixture))
        assert_close(actual, expected, torch.float32)


@each_strategy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_weight_dtypes(strategy: str, dtype: torch.dtype, num_tokens: int) -> None:
    fixture = _small_fixture(num_tokens)
    fixture = replace(fixture, topk_weights=fixture.topk_weights.to(dtype))
    assert_close(_run(strategy, fixture, shard_of(fixture)), fixture.routed(), torch.float32)


@each_strategy
@pytest.mark.parametrize("nothing", [-1, -5, 16, 23, 2**31 - 1])
@pytest.mark.parametrize("num_tokens", [2, 64])
def test_rows_without_experts_are_exactly_zero(
    strategy: str, nothing: int, num_tokens: int
) -> None:
    """Their weights stay, and are NaN in one row; one more row has a single such id."""
    fixture = make_fixture(torch.bfloat16, num_tokens)
    half = num_tokens // 2
    fixture.topk_ids[half:] = nothing
    fixture.topk_ids[0, 2] = nothing
    fixture.topk_weights[-1] = torch.nan
    fixture.topk_weights[0, 2] = torch.nan
    last_rank = _run(strategy, fixture, shard_of(fixture, 4, 3))
    assert torch.equal(last_rank[half:], torch.zeros(num_tokens - half, 256))
    actual = _run_all_ranks(strategy, fixture, 4)
    assert torch.equal(actual[half:], torch.zeros(num_tokens - half, 256))
    fixture.topk_weights.nan_to_num_(0.0)
    assert_close(actual[:half], fixture.routed()[:half], torch.bfloat16)


@each_strategy
@pytest.mark.parametrize("num_tokens", [0, 1, 8, 64])
def test_no_row_has_an_expert(strategy: str, num_tokens: int) -> None:
    fixture = _small_fixture(num_tokens)
    fixture.topk_ids[:] = -1
    actual = _run(strategy, fixture, shard_of(fixture))
    assert torch.equal(actual, torch.zeros(num_tokens, 16))


@each_strategy
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_repeated_ids_add_up(strategy: str, num_tokens: int) -> None:
    fixture = _small_fixture(num_tokens)
    fixture.topk_ids[:, 2] = fixture.topk_ids[:, 0]
    fixture.topk_ids[::3] = 5
    assert_close(_run_all_ranks(strategy, fixture, 2), fixture.routed(), torch.float32)


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_name", ["w13_weight", "w2_weight"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_an_unused_expert_cannot_leak(
    strategy: str, dtype: torch.dtype, weight_name: str, poison: float, num_tokens: int
) -> None:
    fixture = _small_fixture(num_tokens, dtype)
    fixture.topk_ids[fixture.topk_ids == 15] = -1
    expected = fixture.routed()
    getattr(fixture, weight_name)[15] = poison
    assert_close(_run(strategy, fixture, shard_of(fixture)), expected, dtype)


@each_strategy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("num_tokens", [4, 64])
def test_a_poisoned_row_stays_alone(
    strategy: str, dtype: torch.dtype, poison: float, num_tokens: int
) -> None:
    fixture = _small_fixture(num_tokens, dtype)
    shard = shard_of(fixture)
    clean = _run(strategy, fixture, shard)
    fixture.hidden_states[1] = poison
    actual = _run(strategy, fixture, shard)
    assert not actual[1].isfinite().all()
    others = torch.arange(num_tokens) != 1
    assert torch.equal(actual[others], clean[others])


@each_strategy
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_fp16_overflows_only_where_fp32_would(strategy: str, num_tokens: int) -> None:
    """Gate, up and down products exceed 65504, their weighted sum does not."""
    fixture = _small_fixture(num_tokens, torch.float16)
    fixture.w13_weight.abs_().mul_(60)
    fixture.hidden_states.abs_().mul_(800)
    fixture.topk_weights.mul_(1e-6)
    shard = shard_of(fixture)
    rows = fixture.hidden_states.float()
    assert (rows @ fixture.w13_weight[0].float().T).max() > 65504
    assert_close(_run(strategy, fixture, shard), fixture.routed(), torch.float16)


@each_strategy
def test_inputs_are_left_alone(strategy: str) -> None:
    fixture = _small_fixture(8)
    before = [tensor.clone() for tensor in vars(fixture).values()]
    _run(strategy, fixture, shard_of(fixture))
    assert all(map(torch.equal, vars(fixture).values(), before))


@pytest.mark.parametrize(
    ("config", "num_rows", "expected"),
    [
        (EPConfig(), 1, "ragged"),
        (EPConfig(), 4096, "ragged"),
        (EPConfig(host_mode=False), 16, "gated"),
        (EPConfig(host_mode=False), 17, "dense"),
        (EPConfig(host_mode=False, max_gated_rows=0), 1, "dense"),
        (EPConfig(host_mode=False, expert_capacity=32), 33, "grouped"),
        (EPConfig(host_mode=False, expert_capacity=32), 32, "dense"),
        (EPConfig(host_mode=False, expert_capacity=8), 16, "gated"),
        (EPConfig(host_mode=False), 112, "dense"),
        (EPConfig(host_mode=False), 128, "grouped"),
        (EPConfig(host_mode=False, experts="dense"), 128, "dense"),
        (EPConfig(experts="grouped"), 16, "dense"),
        (EPConfig(experts="grouped"), 17, "grouped"),
        (EPConfig(experts="grouped", expert_capacity=8), 9, "grouped"),
        (EPConfig(experts="grouped", expert_capacity=8), 8, "dense"),
        (EPConfig(experts="dense"), 4, "dense"),
        (EPConfig(experts="gated"), 400, "gated"),
    ],
)
def test_choice(config: EPConfig, num_rows: int, expected: str) -> None:
    """With 2 of 16 experts a row, four even shares are half of the rows, in steps of 16."""
    assert choose_strategy(config, num_rows, top_k=2, num_experts=16) == expected


@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_experts", "capacity"),
    [(64 * 128, 6, 384, 512), (1, 1, 256, 16), (0, 8, 64, 0), (100, 8, 256, 16), (100, 9, 256, 16)],
)
def test_automatic_capacity(num_rows: int, top_k: int, num_experts: int, capacity: int) -> None:
    assert automatic_capacity(num_rows, top_k, num_experts) == capacity
    assert capacity >= 4 * num_rows * top_k / num_experts


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_by_itself_for_a_prompt_chunk(dtype: torch.dtype) -> None:
    fixture = make_fixture(
        dtype, 200, hidden_size=16, moe_intermediate_size=8, num_experts=64, top_k=2
    )
    ep_config = EPConfig(host_mode=False)
    assert choose_strategy(ep_config, 200, top_k=2, num_experts=64) == "grouped"
    output = run_experts("grouped", tokens_of(fixture), shard_of(fixture), ep_config)
    assert output.overflow is not None and output.overflow.tolist() == [0]
    assert_close(output.values, fixture.routed(), dtype)


def _small_fixture(num_tokens: int = 12, dtype: torch.dtype = torch.float32) -> Fixture:
    return make_fixture(dtype, num_tokens, hidden_size=16, moe_intermediate_size=8)
