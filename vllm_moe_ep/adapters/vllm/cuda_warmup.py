"""Compile the kernels of every size that will be captured, before a CUDA graph captures them.

A kernel cannot be compiled while a graph is captured, and one that is compiled in a user's step
makes it seconds long.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from vllm.logger import init_logger

from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.deepgemm.build_lock import exclusive_lock
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.deepgemm.library import kernel_cache
from vllm_moe_ep.deepgemm.path_table import Entry, first_tokens
from vllm_moe_ep.layers.device_experts import DeviceKernel
from vllm_moe_ep.stages import RoutedTokens

logger = init_logger("vllm.vllm_moe_ep")
_warmed: set[tuple[object, ...]] = set()
_LOCK = "vllm-moe-ep-warmup.lock"


def warmup_rows(
    capture_sizes: Iterable[int],
    max_num_tokens: int,
    token_size: int,
    boundaries: Iterable[int],
) -> list[int]:
    """Row counts to run: what graphs capture, both sides of each boundary, powers of two.

    Args:
        capture_sizes: tokens per rank.
        max_num_tokens: per rank.
        token_size: token ranks, whose rows come together.
        boundaries: rows from which the way to compute changes.
    """
    per_rank = {size for size in capture_sizes if size <= max_num_tokens} | {max_num_tokens}
    power = 1
    while power < max_num_tokens:
        per_rank.add(power)
        power *= 2
    rows = {size * token_size for size in per_rank}
    for boundary in boundaries:
        rows |= {boundary - 1, boundary}
    return sorted(size for size in rows if 1 <= size <= max_num_tokens * token_size)


def warm_up(
    experts: DeviceKernel,
    config: MoEConfig,
    token_size: int,
    capture_sizes: Iterable[int],
    entries: tuple[Entry, ...],
    weights: HopperWeights,
) -> None:
    """Run the experts once per size; layers of one shape share the kernels, so the first does it.

    Ranks that start together on one cache compile one after the other: the first compiles, the
    others find its kernels.

    Raises:
        TimeoutError: another rank compiles for longer than ten minutes.
    """
    key = (config, weights.is_fp8, weights.tensors[0].shape, entries)
    if key in _warmed:
        return
    _warmed.add(key)
    boundaries = [
        first_tokens(entry, config.top_k, config.num_experts)
        for entry in entries
        if entry.min_rows_per_expert > 0
    ]
    sizes = warmup_rows(capture_sizes, config.max_num_tokens, token_size, boundaries)
    started = time.monotonic()
    device = weights.tensors[0].device
    with exclusive_lock(Path(kernel_cache()) / _LOCK):
        for size in sizes:
            experts(_tokens(size, config, device))
        torch.accelerator.synchronize()
    elapsed_s = time.monotonic() - started
    logger.info_once(
        "static-ep: compiled the experts for %d sizes from %d to %d rows in %.1f s",
        len(sizes),
        sizes[0],
        sizes[-1],
        elapsed_s,
    )


def _tokens(num_rows: int, config: MoEConfig, device: torch.device) -> RoutedTokens:
    """bf16 rows spread evenly over all experts."""
    size = (num_rows, config.top_k)
    pairs = torch.arange(num_rows * config.top_k, device=device, dtype=torch.int32)
    return RoutedTokens(
        torch.zeros(num_rows, config.hidden_size, device=device, dtype=torch.bfloat16),
        (pairs % config.num_experts).view(size),
        # While weights are loaded, torch's default dtype is the model's.
        torch.full(size, 1 / config.top_k, device=device, dtype=torch.float32),
    )
