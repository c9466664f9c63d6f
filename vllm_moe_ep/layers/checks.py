"""Checks of one call, before any collective: a rank that raises there would hang its peers."""

import torch
from torch import Tensor

from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.stages import RoutedTokens


def check_step(
    tokens: RoutedTokens, capacity: int, config: MoEConfig, hidden_dtype: torch.dtype
) -> None:
    """Refuse tokens that do not fit the layer.

    Raises:
        ValueError: says what was wanted and what was found.
    """
    num_tokens = tokens.hidden_states.shape[0]
    if num_tokens > capacity:
        raise ValueError(
            f"This rank has {num_tokens} tokens, but the step's capacity is {capacity}; raise the "
            "capacity on every rank."
        )
    if capacity > config.max_num_tokens:
        raise ValueError(
            f"The step's capacity is {capacity} rows, but the layer was set up for "
            f"{config.max_num_tokens}; raise max_num_tokens."
        )
    _check_shape("hidden_states", tokens.hidden_states, (num_tokens, config.hidden_size))
    _check_shape("topk_ids", tokens.topk_ids, (num_tokens, config.top_k))
    _check_shape("topk_weights", tokens.topk_weights, (num_tokens, config.top_k))
    if tokens.hidden_states.dtype != hidden_dtype:
        raise ValueError(
            f"hidden_states must be {hidden_dtype}, as the weights are; found "
            f"{tokens.hidden_states.dtype}."
        )
    if tokens.topk_ids.is_floating_point() or tokens.topk_ids.dtype is torch.bool:
        raise ValueError(f"topk_ids must be integers, found {tokens.topk_ids.dtype}.")
    if not tokens.topk_weights.is_floating_point():
        raise ValueError(f"topk_weights must be floats, found {tokens.topk_weights.dtype}.")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, found {list(tensor.shape)}.")
