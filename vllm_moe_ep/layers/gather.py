"""Gather the rows of all token ranks in one collective."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_moe_ep.collectives import Collectives
from vllm_moe_ep.config import EPConfig, MoEConfig
from vllm_moe_ep.layers.routing import normalise_topk_ids
from vllm_moe_ep.placement import NO_EXPERT
from vllm_moe_ep.quant.cast import dequantise_rows, quantise_rows
from vllm_moe_ep.quant.formats import QuantFormat
from vllm_moe_ep.quant.weight import Quantised
from vllm_moe_ep.stages import RoutedTokens

# Each part's columns start on such a boundary, so that a typed view of them is aligned.
ALIGNMENT_BYTES = 16
_BYTE_PADDING = 0xFF


def gather_tokens(
    tokens: RoutedTokens,
    capacity: int,
    config: MoEConfig,
    ep_config: EPConfig,
    collectives: Collectives,
    activation: QuantFormat | None = None,
) -> RoutedTokens:
    """[num_tokens] rows of each token rank -> [token_size * capacity] rows on every one.

    Padding rows select no expert; their activations and weights are unspecified and may be NaN.
    With a token group of one rank nothing is packed, gathered or padded.

    Args:
        activation: the fp8 format that the experts cast rows to, or None. The byte path then
            sends rows in it, with their scales: fewer bytes and the same numbers.
    """
    if collectives.token_size == 1:
        return tokens
    ids = normalise_topk_ids(tokens.topk_ids, config.num_experts)
    tokens = RoutedTokens(tokens.hidden_states, ids, tokens.topk_weights.to(torch.float32))
    if ep_config.gather == "fp32":
        packed = _pack_fp32(tokens, capacity)
        return _unpack_fp32(collectives.all_gather(packed), tokens)
    if activation is None:
        hidden, topk_ids, topk_weights = _gather_bytes(_parts(tokens), capacity, collectives)
        return RoutedTokens(hidden, topk_ids, topk_weights)
    rows = quantise_rows(tokens.hidden_states, activation)
    parts = (rows.values, rows.scale, tokens.topk_ids, tokens.topk_weights)
    values, scale, topk_ids, topk_weights = _gather_bytes(parts, capacity, collectives)
    kept = dequantise_rows(Quantised(values, scale, rows.block_size))
    return RoutedTokens(kept, topk_ids, topk_weights, is_cast=True)


def _parts(tokens: RoutedTokens) -> tuple[Tensor, ...]:
    return tokens.hidden_states, tokens.topk_ids, tokens.topk_weights


def row_bytes(part_bytes: Sequence[int]) -> int:
    """Bytes of one packed row whose parts have these sizes."""
    return sum(_aligned(num_bytes) for num_bytes in part_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _gather_bytes(parts: Sequence[Tensor], capacity: int, collectives: Collectives) -> list[Tensor]:
    """Each part, [num_tokens, columns] of any dtype, of all token ranks, in one collective."""
    return _unpack_bytes(collectives.all_gather(_pack_bytes(parts, capacity)), parts)


def _pack_bytes(parts: Sequence[Tensor], capacity: int) -> Tensor:
    """uint8 [capacity, width]; padding is all 0xFF: id -1 as int32, NaN as a float.

    Joined, not copied into place: how many rows there are decides whether a copy broadcasts, and
    a compiler then makes graphs of their own for 0 and 1.
    """
    missing_rows = capacity - parts[0].shape[0]
    spans = []
    for part in parts:
        num_bytes = _row_bytes(part)
        padding = (0, _aligned(num_bytes) - num_bytes, 0, missing_rows)
        # Flat first: a tensor of no rows and one column may have a stride that forbids the view.
        as_bytes = part.reshape(-1).view(torch.uint8).view(part.shape[0], num_bytes)
        spans.append(F.pad(as_bytes, padding, value=_BYTE_PADDING))
    return torch.cat(spans, dim=1)


def _unpack_bytes(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Typed views of the spans, without a copy."""
    start = 0
    views = []
    for part in like:
        views.append(packed.narrow(1, start, _row_bytes(part)).view(part.dtype))
        start += _aligned(_row_bytes(part))
    return views


def _row_bytes(part: Tensor) -> int:
    return part.shape[1] * part.element_size()


def _pack_fp32(tokens: RoutedTokens, capacity: int) -> Tensor:
    """fp32 [capacity, hidden_size + 2 * top_k]; it holds bf16, fp16 and the ids exactly."""
    missing_rows = capacity - tokens.hidden_states.shape[0]
    columns = [
        F.pad(part.to(torch.float32), (0, 0, 0, missing_rows), value=padding)
        for part, padding in zip(_parts(tokens), (0.0, float(NO_EXPERT), 0.0), strict=True)
    ]
    return torch.cat(columns, dim=1)


def _unpack_fp32(packed: Tensor, like: RoutedTokens) -> RoutedTokens:
    widths = [part.shape[1] for part in _parts(like)]
    columns = packed.split(widths, dim=1)
    parts = zip(columns, _parts(like), strict=True)
    return RoutedTokens(*(column.to(part.dtype) for column, part in parts))
