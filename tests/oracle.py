"""The right answer, by plain loops in fp64. Imports nothing of the project."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

REL_L2_LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

# fp64 [1, k] -> fp64 [1, k]: what is left of activations after a cast.
Cast = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fixture:
    """Inputs and all experts' weights of one layer."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13_weight: Tensor
    w2_weight: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype

    def routed(self, limit: float | None = None, cast: Cast | None = None) -> Tensor:
        return routed_experts(
            self.hidden_states,
            self.topk_ids,
            self.topk_weights,
            self.w13_weight,
            self.w2_weight,
            limit,
            cast,
        )


def make_fixture(
    dtype: torch.dtype = torch.float32,
    num_tokens: int = 64,
    hidden_size: int = 256,
    moe_intermediate_size: int = 128,
    num_experts: int = 16,
    top_k: int = 4,
) -> Fixture:
    """Random inputs from torch's current seed; int32 ids, fp32 weights renormalised per row."""
    width = moe_intermediate_size
    scores, topk_ids = torch.rand(num_tokens, num_experts).topk(top_k, dim=1)
    return Fixture(
        torch.randn(num_tokens, hidden_size).to(dtype),
        topk_ids.to(torch.int32),
        scores / scores.sum(dim=1, keepdim=True),
        (torch.randn(num_experts, 2 * width, hidden_size) / hidden_size**0.5).to(dtype),
        (torch.randn(num_experts, hidden_size, width) / width**0.5).to(dtype),
    )


def expert(
    row: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float | None = None,
    weight: float = 1.0,
    cast: Cast | None = None,
) -> Tensor:
    """One expert on one row, fp64. Activations are cast before each product."""
    row = _cast(row.double(), cast)
    gate, up = (w13.double() @ row).chunk(2)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return w2.double() @ _cast(weight * gate * torch.sigmoid(gate) * up, cast)


def _cast(row: Tensor, cast: Cast | None) -> Tensor:
    return row if cast is None else cast(row[None])[0]


def routed_experts(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    limit: float | None = None,
    cast: Cast | None = None,
) -> Tensor:
    """fp64 [num_tokens, hidden_size]; ids outside the experts are skipped, repeated ones add up."""
    output = torch.zeros(hidden_states.shape, dtype=torch.float64)
    ids, weights = topk_ids.tolist(), topk_weights.tolist()
    for token, row in enumerate(hidden_states):
        weight_of: dict[int, float] = {}
        for expert_id, weight in zip(ids[token], weights[token], strict=True):
            if 0 <= expert_id < len(w13_weight):
                weight_of[expert_id] = weight_of.get(expert_id, 0.0) + weight
        for expert_id, weight in weight_of.items():
            w13, w2 = w13_weight[expert_id], w2_weight[expert_id]
            output[token] += expert(row, w13, w2, limit, weight, cast)
    return output


def shared_expert(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, cast: Cast | None = None
) -> Tensor:
    """fp64 [num_tokens, hidden_size]: one expert on every row, weight 1."""
    output = torch.zeros(hidden_states.shape, dtype=torch.float64)
    for token, row in enumerate(hidden_states):
        output[token] = expert(row, w13, w2, cast=cast)
    return output


def rel_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; a zero answer must be met exactly. NaN stays NaN."""
    assert actual.shape == expected.shape, f"{actual.shape} instead of {expected.shape}"
    difference = (actual.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's limit of the fp64 answer; NaN and infinity fail."""
    error = rel_l2(actual, expected)
    assert error <= REL_L2_LIMIT[dtype], f"rel-L2 {error:.3g} exceeds {REL_L2_LIMIT[dtype]}"
