"""Random weights and steps of a layer."""

import torch
from torch import Tensor

from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.stages import RoutedTokens

ROUTINGS = ("uniform", "skewed", "one-expert")
DTYPES = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Of the hidden states, by weight format."""
_BLOCK = 128


def random_weights(shape: LayerShape, form: str, device: torch.device) -> HopperWeights:
    """Numbers of about 1 / sqrt(k): dense ones, or fp8 with an fp32 scale per 128x128 block.

    Raises:
        SettingsError: fp8 blocks do not divide a size.
    """
    first = (shape.num_experts, 2 * shape.width, shape.hidden_size)
    second = (shape.num_experts, shape.hidden_size, shape.width)
    if form != "fp8":
        return HopperWeights(*(_dense(size, DTYPES[form], device) for size in (first, second)))
    if shape.hidden_size % _BLOCK or shape.width % _BLOCK:
        raise SettingsError(
            f"fp8 needs a hidden size and a width in multiples of {_BLOCK}, found "
            f"{shape.hidden_size} and {shape.width}: leave fp8 out of --formats."
        )
    return HopperWeights(_fp8(first, device), _fp8(second, device))


def _dense(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    weight = torch.empty(size, dtype=dtype, device=device)
    for matrix in weight:
        matrix.normal_(std=size[2] ** -0.5)
    return weight


def _fp8(size: tuple[int, int, int], device: torch.device) -> ScaledWeight:
    num_experts, n, k = size
    values = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
    for matrix in values:
        matrix.copy_(torch.randn(n, k, device=device) * 16)
    scale = torch.rand(num_experts, n // _BLOCK, k // _BLOCK, device=device) + 0.5
    return ScaledWeight(values, scale * (k**-0.5 / 16), "float32", _BLOCK)


def random_tokens(
    shape: LayerShape, num_tokens: int, routing: str, dtype: torch.dtype, device: torch.device
) -> RoutedTokens:
    """One step. No row chooses an expert twice, as with a real router.

    Args:
        routing: "uniform": all experts alike. "skewed": the first ones more often. "one-expert":
            every row chooses the same experts, with a top_k of 1 a single one.
    """
    scores = torch.rand(num_tokens, shape.num_experts, device=device)
    descending = torch.arange(shape.num_experts, device=device).flip(0)
    if routing == "skewed":
        scores += 2 * descending / shape.num_experts
    if routing == "one-expert":
        scores += 2.0 * descending
    ids = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, shape.top_k, device=device) + 0.1
    hidden_states = torch.randn(num_tokens, shape.hidden_size, device=device).to(dtype)
    return RoutedTokens(hidden_states, ids, weights / weights.sum(dim=1, keepdim=True))
