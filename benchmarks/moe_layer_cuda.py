"""One DeepSeek MoE layer's routed experts on a GPU: our layer beside vLLM's own backends.

Every way is first compared with an fp32 answer on the stored weights. Then each is captured in a
CUDA graph and replayed, the L2 cache overwritten before each replay; the median counts. All of
it happens in one process. Needs vLLM for CUDA.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    make_moe_prepare_and_finalize_no_dp_ep,
)
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_moe_ep import __version__
from vllm_moe_ep.adapters.vllm.engine_experts import EngineExperts
from vllm_moe_ep.deepgemm.experts_by_size import ExpertsBySize
from vllm_moe_ep.deepgemm.hopper_experts import HopperExperts, HopperWeights
from vllm_moe_ep.deepgemm.library import deep_gemm
from vllm_moe_ep.deepgemm.path_table import TABLE, choose
from vllm_moe_ep.deepgemm.row_kernels import load_row_kernels
from vllm_moe_ep.deepgemm.weight_scales import ScaledWeight
from vllm_moe_ep.stages import RoutedTokens

DEVICE = torch.device("cuda")
FLUSH_BYTES = 256 << 20
WARM_UPS = 3
LIMITS = {"fp8": 0.06, "bf16": 1e-2}
CHECKED_TOKENS = 512
Way = Callable[[RoutedTokens], Tensor]


@dataclass(frozen=True)
class Shape:
    """One rank's share of a layer."""

    num_experts: int
    top_k: int
    hidden_size: int
    width: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-experts", type=int, default=32, help="on this rank")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--intermediate-size", type=int, default=2048)
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192", help="sizes of a step")
    parser.add_argument("--formats", default="fp8,bf16")
    parser.add_argument("--routing", choices=("uniform", "skewed", "one"), default="uniform")
    parser.add_argument("--ways", action="store_true", help="time each of our ways at each size")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bandwidth-tbs", type=float, default=4.3, help="of the floor")
    parser.add_argument("--fp8-pflops", type=float, default=1.5, help="of the floor")
    parser.add_argument("--bf16-pflops", type=float, default=0.79, help="of the floor")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    return parser.parse_args()


def random_weights(shape: Shape, form: str) -> HopperWeights:
    """fp8 values with scales that bring them to about 1 / sqrt(k); or bf16 likewise."""
    first = (shape.num_experts, 2 * shape.width, shape.hidden_size)
    second = (shape.num_experts, shape.hidden_size, shape.width)
    if form == "bf16":
        return HopperWeights(_bf16(first), _bf16(second))
    return HopperWeights(_fp8(first), _fp8(second))


def _bf16(size: tuple[int, int, int]) -> Tensor:
    weight = torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
    for matrix in weight:
        matrix.normal_(std=size[2] ** -0.5)
    return weight


def _fp8(size: tuple[int, int, int]) -> ScaledWeight:
    num_experts, n, k = size
    values = torch.empty(size, dtype=torch.float8_e4m3fn, device=DEVICE)
    for matrix in values:
        matrix.copy_(torch.randn(n, k, device=DEVICE) * 16)
    scale = torch.rand(num_experts, n // 128, k // 128, device=DEVICE) + 0.5
    return ScaledWeight(values, scale * (k**-0.5 / 16), "float32", 128)


def random_tokens(shape: Shape, num_tokens: int, routing: str) -> RoutedTokens:
    """Without repeats in a row: all experts alike, the first more often, or always the same."""
    scores = torch.rand(num_tokens, shape.num_experts, device=DEVICE)
    if routing == "skewed":
        scores += 2 * torch.arange(shape.num_experts, device=DEVICE).flip(0) / shape.num_experts
    if routing == "one":
        scores += torch.arange(shape.num_experts, device=DEVICE).flip(0) * 2.0
    ids = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_tokens, shape.top_k, device=DEVICE) + 0.1
    hidden = torch.randn(num_tokens, shape.hidden_size, device=DEVICE).bfloat16()
    return RoutedTokens(hidden, ids, weights / weights.sum(dim=1, keepdim=True))


def _numbers(weight: Tensor | ScaledWeight, expert: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[expert].float()
    scale = weight.scale[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.values[expert].float() * scale


def expected(weights: HopperWeights, tokens: RoutedTokens) -> Tensor:
    """fp32, expert by expert; activations are not rounded."""
    rows = tokens.hidden_states.float()
    total = torch.zeros_like(rows)
    for expert in tokens.topk_ids.unique().tolist():
        hits = tokens.topk_ids == expert
        routed = hits.any(dim=1)
        weight = torch.where(hits, tokens.topk_weights, 0.0).sum(dim=1)[routed, None]
        gate, up = (rows[routed] @ _numbers(weights.w13, expert).T).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        total[routed] += weight * (inner @ _numbers(weights.w2, expert).T)
    return total


def relative_error(way: Way, weights: HopperWeights, tokens: RoutedTokens) -> float:
    """|output - answer| / |answer| over the first tokens of the step."""
    output = way(tokens)[:CHECKED_TOKENS].float()
    parts = (tokens.hidden_states, tokens.topk_ids, tokens.topk_weights)
    answer = expected(weights, RoutedTokens(*(part[:CHECKED_TOKENS] for part in parts)))
    return float((output - answer).norm() / answer.norm())


def graph_us(way: Way, tokens: RoutedTokens, repeats: int, flush: Tensor) -> float:
    """Median of replays, microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            way(tokens)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way(tokens)
    times = []
    for repeat in range(WARM_UPS + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repeat >= WARM_UPS:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def moe_config(shape: Shape, max_num_tokens: int) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=shape.num_experts,
        experts_per_token=shape.top_k,
        hidden_dim=shape.hidden_size,
        intermediate_size=shape.width,
        num_local_experts=shape.num_experts,
        num_logical_experts=shape.num_experts,
        activation=MoEActivation.SILU,
        device=DEVICE,
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        max_num_tokens=max_num_tokens,
    )


def vllm_deep_gemm(config: FusedMoEConfig, weights: HopperWeights) -> Way:
    """vLLM's own DeepGEMM experts."""
    assert isinstance(weights.w13, ScaledWeight) and isinstance(weights.w2, ScaledWeight)
    quant = fp8_w8a8_moe_quant_config(
        w1_scale=weights.w13.scale, w2_scale=weights.w2.scale, block_shape=[128, 128]
    )
    kernel = mk.FusedMoEKernel(
        make_moe_prepare_and_finalize_no_dp_ep(False), DeepGemmExperts(config, quant)
    )
    w13, w2 = weights.tensors
    return lambda tokens: kernel.apply(
        hidden_states=tokens.hidden_states,
        w1=w13,
        w2=w2,
        topk_weights=tokens.topk_weights,
        topk_ids=tokens.topk_ids,
        activation=MoEActivation.SILU,
        global_num_experts=w13.shape[0],
        expert_map=None,
        apply_router_weight_on_input=False,
    )


def ways_of(
    shape: Shape, form: str, weights: HopperWeights, max_num_tokens: int, with_all: bool
) -> dict[str, Way]:
    """Our layer under "ours", then vLLM's; with_all adds each of our ways alone."""
    config = moe_config(shape, max_num_tokens)
    engine = EngineExperts(config, weights, None)
    bundle = deep_gemm("fp8_block" if form == "fp8" else "bf16")
    deepgemm = HopperExperts(bundle, weights, load_row_kernels("triton_kernels"))
    ways: dict[str, Way] = {"ours": ExpertsBySize(TABLE[form], shape.num_experts, deepgemm, engine)}
    if with_all:
        ways["ours_64"] = lambda tokens: deepgemm(tokens, 64)
        ways["ours_128"] = lambda tokens: deepgemm(tokens, 128)
    ways["triton"] = engine
    if form == "fp8":
        ways["vllm_dg"] = vllm_deep_gemm(config, weights)
    return ways


def floor_us(options: argparse.Namespace, shape: Shape, form: str, tokens: RoutedTokens) -> float:
    """The larger of the time to read the weights of the experts hit, and that of the products."""
    numbers = 3 * shape.hidden_size * shape.width
    num_bytes = tokens.topk_ids.unique().numel() * numbers * (1 if form == "fp8" else 2)
    flops = 2 * tokens.topk_ids.numel() * numbers
    pflops = options.fp8_pflops if form == "fp8" else options.bf16_pflops
    return max(num_bytes / options.bandwidth_tbs / 1e12, flops / pflops / 1e15) * 1e6


def measure(
    options: argparse.Namespace,
    shape: Shape,
    form: str,
    ways: dict[str, Way],
    weights: HopperWeights,
    num_tokens: int,
) -> dict[str, Any]:
    """One row. A way that fails is reported and the rest still runs."""
    tokens = random_tokens(shape, num_tokens, options.routing)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    entry = choose(TABLE[form], num_tokens, shape.top_k, shape.num_experts)
    row: dict[str, Any] = {
        "format": form,
        "tokens": num_tokens,
        "way": entry.path + (f"_{entry.alignment}" if entry.alignment else ""),
        "floor": round(floor_us(options, shape, form, tokens), 1),
    }
    for name, way in ways.items():
        try:
            error = relative_error(way, weights, tokens)
            if not error <= LIMITS[form]:
                row[f"{name}_failure"] = f"relative error {error:.3g} exceeds {LIMITS[form]}"
            row[f"{name}_error"] = round(error, 5)
            row[name] = round(graph_us(way, tokens, options.repeats, flush), 1)
        except Exception as failure:
            row[f"{name}_failure"] = " ".join(repr(failure).split())[:300]
    stock = [row[name] for name in ("triton", "vllm_dg") if name in row]
    if "ours" in row and stock:
        row["vs_best"] = round(min(stock) / row["ours"], 3)
        row["vs_auto"] = round(row.get("triton", min(stock)) / row["ours"], 3)
    return row


def show(row: dict[str, Any], ways: dict[str, Way]) -> None:
    columns = ["format", "tokens", "way", "floor", *ways, "vs_best", "vs_auto"]
    print(" ".join(f"{row.get(name, '-')!s:>12}" for name in columns), flush=True)
    for name, text in row.items():
        if name.endswith("_failure"):
            print(f"    {name}: {text}", flush=True)


def versions() -> dict[str, str]:
    bundle = deep_gemm("bf16")
    return {
        "vllm-moe-ep": __version__,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "deep_gemm": bundle.description,
        "nvcc": str(bundle.toolkit.version),
        "gpu": torch.cuda.get_device_name(),
    }


def main() -> int:
    options = arguments()
    shape = Shape(
        options.num_experts, options.top_k, options.hidden_size, options.intermediate_size
    )
    sizes = [int(size) for size in options.tokens.split(",")]
    torch.manual_seed(0)
    failed = False
    with set_current_vllm_config(VllmConfig()):
        init_workspace_manager(DEVICE)
        print(json.dumps({"versions": versions(), "shape": vars(shape)}), flush=True)
        for form in options.formats.split(","):
            weights = random_weights(shape, form)
            ways = ways_of(shape, form, weights, max(sizes), options.ways)
            if not options.json:
                names = ["format", "tokens", "way", "floor", *ways, "vs_best", "vs_auto"]
                print(" ".join(f"{name:>12}" for name in names), flush=True)
            for size in sizes:
                row = measure(options, shape, form, ways, weights, size)
                failed |= any(name.endswith("_failure") for name in row)
                print(json.dumps(row), flush=True) if options.json else show(row, ways)
            del weights, ways
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
