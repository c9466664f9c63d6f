"""`vllm-moe-ep plan`: what a model's MoE layers would hold, read and send on given ranks."""

import argparse
from collections.abc import Iterator

from vllm_moe_ep.cli.inputs import path_of
from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.plan import costs
from vllm_moe_ep.plan.costs import Spread
from vllm_moe_ep.plan.kernels import KernelCost, kernel_costs
from vllm_moe_ep.plan.model import ModelShape, read_shape
from vllm_moe_ep.plan.platforms import PLATFORMS, Platform
from vllm_moe_ep.plan.times import MOST_ROWS, break_evens, experts_seconds

_GIB, _MIB = 2**30, 2**20
# Far above what is served, and below what sums of floats can hold.
_MOST = {"--ep-size": 2**20, "--batch": 2**31}
STRATEGIES = ("dense", "gated", "grouped")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument(
        "--model", type=path_of("--model"), required=True, help="config.json or its folder"
    )
    parser.add_argument("--platform", choices=sorted(PLATFORMS), required=True)
    parser.add_argument("--ep-size", type=int, required=True, help="ranks that share the experts")
    parser.add_argument(
        "--batch", type=int, required=True, help="rows of a step, of all token ranks together"
    )
    parser.add_argument(
        "--tokens",
        choices=("replicated", "sharded"),
        default="replicated",
        help="whether every rank holds all rows or each its own (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        SettingsError: --ep-size or --batch is out of range, or the model is not readable.
        UnsupportedError: the model has no DeepSeek MoE layers.
    """
    for option, value in (("--ep-size", args.ep_size), ("--batch", args.batch)):
        if value < 1:
            raise SettingsError(f"{option} must be at least 1, found {value}.")
        if value > _MOST[option]:
            raise SettingsError(f"{option} must be at most {_MOST[option]}, found {value}.")
    model, platform = read_shape(args.model), PLATFORMS[args.platform]
    spread = Spread(args.ep_size, args.tokens == "replicated")
    print("\n".join(_lines(model, spread, args.batch, platform)))
    return 0


def _lines(model: ModelShape, spread: Spread, num_rows: int, platform: Platform) -> Iterator[str]:
    yield (
        f"{model.num_layers} MoE layers, {model.num_experts} experts ({model.expert_format}), "
        f"{model.top_k} per token; {costs.local_experts(model, spread)} per rank on "
        f"{spread.ep_size} ranks"
    )
    yield "Memory per rank, MoE layers only:"
    weights = costs.weight_bytes(model, spread)
    rows = costs.activation_bytes(model, num_rows)
    share = (weights + rows) / platform.memory_bytes
    yield f"  weights {weights / _GIB:.2f} GiB, activations {rows / _MIB:.2f} MiB"
    yield f"  {share:.0%} of {platform.memory_bytes / _GIB:.0f} GiB" + (
        ": does not fit" if share > 1 else ""
    )
    yield f"Experts hit by {num_rows} rows: {costs.share_hit(model, num_rows):.1%}"
    yield "Weights read per rank and step, and the least time for it:"
    kernels = kernel_costs(model, spread, num_rows) if platform.has_nki_kernels else []
    for strategy in STRATEGIES:
        read = model.num_layers * costs.read_bytes(model, spread, num_rows, strategy)
        seconds = model.num_layers * experts_seconds(model, spread, num_rows, strategy, platform)
        yield (
            f"  {strategy:8} {read / _GIB:8.3f} GiB; experts {seconds * 1e3:8.2f} ms at "
            f"{costs.computed_rows(model, num_rows, strategy)} rows each"
        )
    if platform.has_nki_kernels:
        yield from _kernel_lines(model, spread, kernels)
    yield from _collective_lines(model, spread, num_rows, platform)
    found = break_evens(model, spread, platform)
    yield f"Break-even, by these times at up to {MOST_ROWS} rows:"
    yield "  gates save a tenth of dense experts' time " + (
        f"up to {found.gated_until} rows" if found.gated_until else "at no size"
    )
    yield "  grouped beats dense " + (
        f"from {found.grouped_from} rows on" if found.grouped_from else "at no size for good"
    )


def _kernel_lines(model: ModelShape, spread: Spread, kernels: list[KernelCost]) -> Iterator[str]:
    """Per form of the weights: the bound of each engine, the critical one, and a call."""
    yield "NKI expert kernels, bounds by counts of their emulator (none is a measurement):"
    if not kernels:
        yield f"  none for {model.expert_format} experts: only bandwidth and operations count"
    for cost in kernels:
        hit = costs.computed_experts(model, spread, cost.num_rows, "gated")
        if cost.refusal is not None:
            yield f"  {cost.form}: none, {cost.refusal}"
            continue
        name, micros = cost.critical(hit)
        each = ", ".join(f"{engine} {bound:.1f}" for engine, bound in cost.each_us.items())
        yield f"  {cost.form}: us per hit expert: {each}"
        yield (
            f"    gated, calls of {cost.num_rows} rows, {hit:.2f} hit experts a layer: "
            f"{model.num_layers * micros / 1e3:.2f} ms, bound by {name}"
        )


def _collective_lines(
    model: ModelShape, spread: Spread, num_rows: int, platform: Platform
) -> Iterator[str]:
    number, seconds = costs.num_collectives(spread), costs.collective_seconds(spread, platform)
    total = model.num_layers * number * seconds
    gathered = costs.gathered_bytes(model, spread, num_rows)
    reduced = costs.reduced_bytes(model, spread, num_rows)
    yield "Collectives:"
    yield (
        f"  {number} per layer, {gathered / _MIB:.3f} MiB gathered and {reduced / _MIB:.3f} MiB "
        "reduced"
    )
    yield f"  {total * 1e3:.1f} ms of latency per step"
    if number and spread.ep_size != platform.collective_ranks:
        yield f"  (from figures for {platform.collective_ranks} ranks: none known for this many)"
