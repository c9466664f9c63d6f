"""The contiguous layout and the combine, against plain loops."""

import numpy as np
import pytest
import torch
from oracle import rel_l2

from vllm_moe_ep.deepgemm.contiguous_layout import max_layout_rows, plan_contiguous
from vllm_moe_ep_kernels.reference.combine_pairs import combine_pairs

SIZES = [(0, 2, 4, 8), (1, 1, 1, 128), (7, 3, 5, 4), (64, 4, 16, 8), (5, 8, 256, 128), (9, 2, 3, 1)]
each_size = pytest.mark.parametrize(("num_tokens", "top_k", "num_experts", "alignment"), SIZES)


def _ids(num_tokens: int, top_k: int, num_experts: int, routing: str) -> torch.Tensor:
    ids = torch.randint(0, num_experts, (num_tokens, top_k))
    if routing == "one expert":
        ids[:] = num_experts - 1
    if routing == "sentinels":
        sentinels = torch.tensor([-1, num_experts, num_experts + 7, -(2**31)])
        chosen = sentinels[torch.randint(0, 4, ids.shape)]
        ids = torch.where(torch.rand(ids.shape) < 0.5, chosen, ids)
    return torch.full_like(ids, -1) if routing == "nobody" else ids


class Model:
    """Rows handed out one after the other, expert by expert."""

    def __init__(self, ids: np.ndarray, num_experts: int, alignment: int) -> None:
        pairs = ids.reshape(-1).tolist()
        bound = max_layout_rows(len(pairs), num_experts, alignment)
        self.row_of_pair = np.full(len(pairs), -1)
        self.token_of_row = np.full(bound, -1)
        self.expert_of_row = np.full(bound, -1)
        self.ends = []
        row = 0
        for expert in range(num_experts):
            for pair in (i for i, e in enumerate(pairs) if e == expert):
                self._place(pair, row, expert, ids.shape[1])
                row += 1
            row = -(-row // alignment) * alignment
            self.ends.append(row)
        for pair in (i for i, e in enumerate(pairs) if not 0 <= e < num_experts):
            self._place(pair, row, -1, ids.shape[1])
            row += 1

    def _place(self, pair: int, row: int, expert: int, top_k: int) -> None:
        self.row_of_pair[pair] = row
        self.token_of_row[row] = pair // top_k
        self.expert_of_row[row] = expert


@each_size
@pytest.mark.parametrize("routing", ["random", "one expert", "sentinels", "nobody"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_layout_equals_the_model(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    alignment: int,
    routing: str,
    dtype: torch.dtype,
) -> None:
    ids = _ids(num_tokens, top_k, num_experts, routing).to(dtype)
    model = Model(ids.numpy(), num_experts, alignment)
    sm90 = plan_contiguous(ids, num_experts, alignment, 9)
    sm100 = plan_contiguous(ids, num_experts, alignment, 10)
    for plan in (sm90, sm100):
        assert plan.row_of_pair.tolist() == model.row_of_pair.tolist()
        assert plan.token_of_row.tolist() == model.token_of_row.tolist()
        assert plan.is_routed.tolist() == ((ids >= 0) & (ids < num_experts)).tolist()
        assert plan.expert_of_row.tolist() == model.expert_of_row.tolist()
        assert plan.grouped_layout.dtype == torch.int32
    assert sm90.grouped_layout.tolist() == model.expert_of_row.tolist()
    assert sm100.grouped_layout.tolist() == model.ends


def test_bound_is_reached_and_follows_from_the_shape_alone() -> None:
    assert max_layout_rows(8, 256, 128) == 8 + 8 * 127
    assert max_layout_rows(1000, 32, 128) == 1000 + 32 * 127
    # One pair more than a full tile for each expert wastes the most.
    ids = torch.arange(3).repeat(5)[:, None]
    plan = plan_contiguous(ids, 3, 4, 10)
    assert plan.grouped_layout[-1] == 24 == max_layout_rows(15, 3, 4)


def test_planning_never_copies_to_the_host() -> None:
    ids = torch.randint(-1, 9, (6, 2), dtype=torch.int32)
    with torch.device("meta"):
        plan = plan_contiguous(torch.empty_like(ids, device="meta"), 8, 16, 9)
    assert plan.token_of_row.shape == (12 + 8 * 15,)


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("routing", ["random", "sentinels", "nobody"])
def test_gather_and_combine_return_the_weighted_sum(major: int, routing: str) -> None:
    num_tokens, top_k, num_experts, width = 23, 4, 6, 12
    ids = _ids(num_tokens, top_k, num_experts, routing)
    weights = torch.rand(num_tokens, top_k)
    hidden = torch.randn(num_tokens, width)
    plan = plan_contiguous(ids, num_experts, 8, major)
    # Expert e multiplies by e + 1; whatever the kernel skips is poisoned.
    values = torch.full((len(plan.token_of_row), width), torch.nan)
    gathered = plan.gather(hidden)
    expected = torch.zeros(num_tokens, width, dtype=torch.float64)
    for token in range(num_tokens):
        for slot in range(top_k):
            expert = int(ids[token, slot])
            if 0 <= expert < num_experts:
                row = plan.row_of_pair[token * top_k + slot]
                values[row] = gathered[row] * (expert + 1)
                expected[token] += weights[token, slot] * (expert + 1) * hidden[token].double()
            else:
                weights[token, slot] = torch.nan
    actual = combine_pairs(values, plan.row_of_pair, plan.is_routed, weights)
    assert actual.dtype == torch.float32
    assert rel_l2(actual, expected) <= 1e-6
    unrouted = ~plan.is_routed.any(dim=1)
    assert torch.equal(actual[unrouted], torch.zeros(int(unrouted.sum()), width))


def test_nan_of_one_token_stays_there() -> None:
    ids = torch.randint(0, 4, (8, 2))
    plan = plan_contiguous(ids, 4, 4, 9)
    hidden = torch.randn(8, 5)
    weights = torch.rand(8, 2)
    clean = combine_pairs(plan.gather(hidden), plan.row_of_pair, plan.is_routed, weights)
    hidden[0] = torch.nan
    dirty = combine_pairs(plan.gather(hidden), plan.row_of_pair, plan.is_routed, weights)
    assert bool(dirty[0].isnan().all())
    assert torch.equal(dirty[1:], clean[1:])


def test_no_tokens() -> None:
    plan = plan_contiguous(torch.empty(0, 4, dtype=torch.int32), 4, 128, 9)
    values = plan.gather(torch.empty(0, 5))
    weights = torch.empty(0, 4)
    assert combine_pairs(values, plan.row_of_pair, plan.is_routed, weights).shape == (0, 5)


def test_layout_and_combine_in_one_graph_for_any_number_of_tokens() -> None:
    def step(ids: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        plan = plan_contiguous(ids, 8, 16, 9)
        return combine_pairs(plan.gather(hidden), plan.row_of_pair, plan.is_routed, weights)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for num_tokens in (2, 7, 64):
        ids = torch.randint(-1, 9, (num_tokens, 2))
        hidden, weights = torch.randn(num_tokens, 4), torch.rand(num_tokens, 2)
        assert torch.equal(compiled(ids, hidden, weights), step(ids, hidden, weights))
