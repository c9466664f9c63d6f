"""One row of the table: check every way, then time it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_moe_ep.bench.answer import ERROR_LIMITS, relative_error
from vllm_moe_ep.bench.clock import cpu_workspace, cuda_workspace, graph_us, wall_us
from vllm_moe_ep.bench.inputs import DTYPES, random_tokens
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.bench.way import Result, Row, Way, Ways
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.stages import RoutedTokens

WEIGHT_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
"""Of one number, without scales."""
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Peak:
    """What the device can do at best, for the floor: bytes/s, and flop/s by weight format."""

    bytes_per_s: float
    flops_per_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bench:
    """How to measure one format of one layer.

    Attributes:
        peak: None where no floor is given.
    """

    shape: LayerShape
    form: str
    routing: str
    repeats: int
    device: torch.device
    peak: Peak | None


def measure(bench: Bench, ways: Ways, weights: HopperWeights, num_tokens: int) -> Row:
    """All ways on one random step. A way that fails is reported, and the rest still runs."""
    tokens = random_tokens(bench.shape, num_tokens, bench.routing, DTYPES[bench.form], bench.device)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=bench.device)
    num_hit = tokens.topk_ids.unique().numel()
    numbers = bench.shape.expert_numbers
    weight_bytes = num_hit * numbers * WEIGHT_BYTES[bench.form]
    flops = 2 * tokens.topk_ids.numel() * numbers
    return Row(
        form=bench.form,
        num_tokens=num_tokens,
        chosen=ways.chosen(num_tokens),
        weight_bytes=weight_bytes,
        flops=flops,
        floor_us=floor_us(bench, weight_bytes, flops),
        results={
            name: _result(bench, way, weights, tokens, flush, ways.release)
            for name, way in ways.by_name.items()
        },
    )


def floor_us(bench: Bench, weight_bytes: int, flops: int) -> float | None:
    """The larger of the time to read the weights and of that for the products, microseconds."""
    if bench.peak is None:
        return None
    seconds = (
        weight_bytes / bench.peak.bytes_per_s,
        flops / bench.peak.flops_per_s[bench.form],
    )
    return max(seconds) * 1e6


def _result(
    bench: Bench,
    way: Way,
    weights: HopperWeights,
    tokens: RoutedTokens,
    flush: Tensor,
    release: Callable[[], None],
) -> Result:
    is_cuda = bench.device.type == "cuda"
    workspace = cuda_workspace if is_cuda else cpu_workspace
    clock: Callable[..., float] = graph_us if is_cuda else wall_us
    result = Result()
    try:
        result = replace(result, error=relative_error(way, weights, tokens))
        release()
        result = replace(result, workspace_bytes=workspace(lambda: way(tokens)))
        return _judged(
            replace(result, us=clock(lambda: way(tokens), bench.repeats, flush)), bench.form
        )
    except Exception as failure:
        # Another project's kernel may fail in any way; the row says how.
        return replace(result, failure=" ".join(repr(failure).split())[:300])


def _judged(result: Result, form: str) -> Result:
    limit = ERROR_LIMITS[form]
    # Not the other way round: a NaN is no small error.
    if result.error is not None and result.error <= limit:
        return result
    return replace(
        result, failure=f"relative error {result.error:.3g} exceeds {limit}: the result is wrong"
    )
