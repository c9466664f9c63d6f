"""Tune the few-row kernels on a Hopper GPU, and time the best steps beside vLLM's experts.

    export PYTHONPATH=.:kernels
    python3 benchmarks/few_rows.py tune --form fp8 --steps fp8.json   # torch and triton alone
    python3 benchmarks/few_rows.py tune --form fp8 --steps fp8.json --dry         # on CPU
    python3 benchmarks/few_rows.py bench fp8.json -- --formats fp8 --ways --tokens 1,32,512

`tune` compiles in many processes and times in one, every product alone and then whole steps, each
compared with an fp32 answer: a few minutes a format. `bench` is `vllm-moe-ep bench` with one more
way, `tuned`. Times are graph replays with a cold L2.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from few_row_variants import SIZES, Product, products, whole_steps
from few_row_workers import Job, Layer, Workers

from vllm_moe_ep.bench import cuda_ways
from vllm_moe_ep.bench.answer import ERROR_LIMITS, relative_error
from vllm_moe_ep.bench.clock import graph_us, wall_us
from vllm_moe_ep.bench.way import Ways
from vllm_moe_ep.cli.main import main as command_line
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.few_row_table import LOOKUP_PAIRS, FewRowStep
from vllm_moe_ep.errors import UnsupportedError
from vllm_moe_ep_kernels.product_tiles import ProductTiles

_FLUSH_BYTES = 256 << 20
_KEPT = 6
_PASSES = 7
Timed = tuple[float, float, FewRowStep]
"""Microseconds, relative error, step."""


class Tuner:
    """The timing process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.layer = Layer(args.form, args.dry)
        self.clock: Callable[..., float] = wall_us if args.dry else graph_us
        num_bytes = 1 if args.dry else _FLUSH_BYTES
        self.flush = torch.empty(num_bytes, dtype=torch.uint8, device=self.layer.device)
        self.start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.0f} s] {text}", flush=True)

    def products(self, workers: Workers) -> dict[Product, float]:
        """Microseconds of every product that compiles in time."""
        every = list(products(self.args.form))
        jobs: dict[tuple[object, ...], Job] = {product.kernel: product for product in every}
        compiled = self._compile(workers, list(jobs.values()), self.args.compile_seconds)
        ready = {job.kernel for job in compiled if isinstance(job, Product)}
        self._wait_until_alone()
        times: dict[Product, float] = {}
        end = time.monotonic() + self.args.time_seconds
        for product in every:
            if product.kernel in ready and time.monotonic() < end:
                call = self.layer.product(product)
                times[product] = self.clock(call, 5, self.flush)
        self.say(f"{len(times)} of {len(every)} products timed")
        return times

    def steps(self, workers: Workers, times: dict[Product, float]) -> dict[int, list[Timed]]:
        """Whole steps by tokens, the fastest first; wrong ones are named and left out."""
        wanted = [(size, step) for size in SIZES for step in whole_steps(size, times)]
        # A planned step's kernels know no size.
        jobs = {(None if step.is_planned else size, step): (size, step) for size, step in wanted}
        compiled = self._compile(workers, list(jobs.values()), self.args.compile_seconds)
        ready = {job[1] for job in compiled if isinstance(job, tuple)}
        results: dict[int, list[Timed]] = {size: [] for size in SIZES}
        end = time.monotonic() + self.args.time_seconds
        for size, step in wanted:
            if step not in ready or time.monotonic() > end:
                continue
            experts, tokens = self.layer.step(step), self.layer.tokens(size)
            error = relative_error(experts, self.layer.weights, tokens)
            if not error <= ERROR_LIMITS[self.args.form]:
                self.say(f"WRONG: {size} tokens, error {error:.3g}, {_short(step)}")
                continue
            us = self.clock(lambda e=experts, t=tokens: e(t), 9, self.flush)
            results[size].append((us, error, step))
        for timed in results.values():
            timed.sort(key=lambda entry: entry[0])
        return results

    def _compile(self, workers: Workers, jobs: list[Job], seconds: float) -> list[Job]:
        # In another order, so that a deadline cuts off some of every kind.
        mixed = [job for first in range(_PASSES) for job in jobs[first::_PASSES]]
        done, failures = workers.compile(mixed, seconds)
        self.say(f"{len(done)} of {len(jobs)} compiled")
        for failure, count in failures.items():
            self.say(f"    {count} failed: {failure}")
        return done

    def _wait_until_alone(self) -> None:
        file, end = self.args.wait_for, time.monotonic() + 120
        while file is not None and not file.exists() and time.monotonic() < end:
            time.sleep(0.5)


def tune(args: argparse.Namespace) -> int:
    """Print the fastest products and steps; the steps go to a file, too."""
    with torch.inference_mode(), Workers(args.processes, args.form, args.dry) as workers:
        tuner = Tuner(args)
        times = tuner.products(workers)
        _print_products(times)
        results = tuner.steps(workers, times)
    for size, timed in results.items():
        for us, error, step in timed[:_KEPT]:
            print(f"{args.form} {size:5d} tokens {us:9.1f} us  {error:.4f}  {_short(step)}")
        for kind, us in _by_kind(timed).items():
            print(f"{args.form} {size:5d} tokens {us:9.1f} us  best of: {kind}")
    kept = {size: [_as_json(entry) for entry in timed[:_KEPT]] for size, timed in results.items()}
    args.steps.write_text(json.dumps({"form": args.form, "steps": kept}))
    return 0


def _print_products(times: dict[Product, float]) -> None:
    groups: dict[str, list[tuple[float, ProductTiles]]] = {}
    for product, us in times.items():
        words = [f"{product.num_tokens} tokens", product.name]
        words += ["planned"] if product.is_planned else []
        words += ["fp8 between"] if product.is_inner_fp8 else []
        key = ", ".join([*words, f"{product.tiles.block_rows} rows"])
        groups.setdefault(key, []).append((us, product.tiles))
    for key, timed in groups.items():
        timed.sort(key=lambda entry: entry[0])
        best = ", ".join(f"{us:.1f} {_tiles(tiles)}" for us, tiles in timed[:4])
        print(f"{key}: {best}; slowest {timed[-1][0]:.1f}", flush=True)


def _by_kind(timed: list[Timed]) -> dict[str, float]:
    """The fastest of each way to compute a step."""
    best: dict[str, float] = {}
    for us, _, step in timed:
        words = ["planned" if step.is_planned else "combined" if step.is_combined else "looked up"]
        words += [f"{step.num_parts} parts"] if step.num_parts > 1 else []
        words += ["fp8 between"] if step.is_inner_fp8 else []
        words += ["overlapped"] if step.gate_up.is_overlapped else []
        words += ["prefetched"] if step.down.prefetch_bytes else []
        best.setdefault(", ".join(words), us)
    return best


def _tiles(tiles: ProductTiles) -> str:
    text = f"{tiles.block_rows}x{tiles.block_columns} w{tiles.num_warps} s{tiles.num_stages}"
    return text + (" tma" if tiles.has_descriptors else "")


def _short(step: FewRowStep) -> str:
    return (
        f"{next(iter(_by_kind([(0.0, 0.0, step)])))}: {_tiles(step.gate_up)}, {_tiles(step.down)}"
    )


def _as_json(entry: Timed) -> dict[str, Any]:
    us, error, step = entry
    return {"us": us, "error": error, "step": dataclasses.asdict(step)}


def _from_json(entry: dict[str, Any]) -> FewRowStep:
    fields = dict(entry["step"])
    gate_up, down = (ProductTiles(**fields.pop(name)) for name in ("gate_up", "down"))
    return FewRowStep(gate_up, down, **fields)


def tuned_step(
    steps: dict[int, list[FewRowStep]], num_tokens: int, top_k: int, num_experts: int
) -> FewRowStep:
    """The best step of the next tuned size with as many rows per expert.

    Raises:
        UnsupportedError: none was tuned for so many rows.
    """
    num_pairs = num_tokens * top_k
    is_alone = num_tokens == 1
    # Of the tuned layer, 32 experts and top-8, with as many rows per expert.
    like = 1 if is_alone else max(2, num_pairs * 4 // num_experts)
    for size in sorted(steps):
        for step in steps[size] if size >= like else ():
            is_right = num_pairs <= LOOKUP_PAIRS or step.is_planned
            if is_right and (is_alone or not step.is_combined or num_experts == 32):
                return step
    raise UnsupportedError(f"No step was tuned for {num_tokens} tokens.")


def bench(args: argparse.Namespace) -> int:
    """`vllm-moe-ep bench`, with the tuned steps as one more way in their format."""
    tuned = json.loads(args.steps.read_text())
    steps = {int(size): list(map(_from_json, kept)) for size, kept in tuned["steps"].items()}
    ways_of = cuda_ways.cuda_ways

    def with_tuned(config: Any, form: str, weights: Any, with_all: bool) -> Ways:
        ways = ways_of(config, form, weights, with_all)
        if form != tuned["form"]:
            return ways
        experts = FewRowExperts(
            weights,
            load_few_row_kernels("triton_kernels"),
            config.num_experts,
            step_of=lambda m, k: tuned_step(steps, m, k, config.num_experts),
        )
        return dataclasses.replace(ways, by_name={**ways.by_name, "tuned": experts})

    cuda_ways.cuda_ways = with_tuned
    return command_line(["bench", *args.arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tuning = commands.add_parser("tune")
    tuning.set_defaults(run=tune)
    tuning.add_argument("--form", choices=("fp8", "bf16"), required=True)
    tuning.add_argument("--steps", type=Path, required=True, help="where the best steps are kept")
    tuning.add_argument("--processes", type=int, default=12)
    tuning.add_argument("--compile-seconds", type=float, default=120, help="at most, twice")
    tuning.add_argument("--time-seconds", type=float, default=60, help="at most, twice")
    tuning.add_argument("--wait-for", type=Path, metavar="FILE", help="time nothing before it")
    tuning.add_argument("--dry", action="store_true", help="a small layer on CPU, no kernel")
    benching = commands.add_parser("bench")
    benching.set_defaults(run=bench)
    benching.add_argument("steps", type=Path)
    benching.add_argument("arguments", nargs="*", help="of `vllm-moe-ep bench`, behind --")
    args = parser.parse_args()
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
