"""Try the few-row kernels on a bare Hopper GPU (torch and triton alone): right and how fast?

    PYTHONPATH=.:kernels python3 benchmarks/few_rows.py [--tokens 1,8,32] [--forms fp8,bf16]
    PYTHONPATH=.:kernels TRITON_INTERPRET=1 python3 benchmarks/few_rows.py --dry

Each size runs in a process of its own, which is ended when a variant reports nothing for
--patience seconds; that variant is then left out. Times are graph replays with a cold L2.
"""

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from vllm_moe_ep.bench.answer import ERROR_LIMITS, relative_error
from vllm_moe_ep.bench.clock import graph_us, wall_us
from vllm_moe_ep.bench.inputs import random_tokens, random_weights
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.deepgemm.few_row_experts import FewRowExperts
from vllm_moe_ep.deepgemm.few_row_kernels import load_few_row_kernels
from vllm_moe_ep.deepgemm.few_row_table import FewRowStep, few_row_step
from vllm_moe_ep_kernels.product_tiles import ProductTiles

BYTES_PER_S = 4.3e12


def variants(num_tokens: int, form: str, shape: LayerShape) -> Iterator[tuple[str, FewRowStep]]:
    """The table's step first, then one change after the other."""
    base = few_row_step(num_tokens, shape.top_k, shape.num_experts, form == "fp8")
    yield "table", base
    yield "descriptors", both(base, has_descriptors=True)
    yield "overlapped", both(base, is_overlapped=True)
    yield "overlapped, prefetch 512", both(base, is_overlapped=True, prefetch_bytes=512)
    fast = both(base, is_overlapped=True, prefetch_bytes=512, has_descriptors=True)
    yield "descriptors, overlapped, prefetch", fast
    for stages in (3, 4, 6):
        if form == "fp8" or stages == 4:
            yield f"{stages} stages", both(base, num_stages=stages)
    for columns in (32, 64, 128):
        yield (
            f"down {columns} columns",
            replace(base, down=replace(base.down, block_columns=columns, num_stages=4)),
        )
    wide = replace(base.gate_up, block_columns=128, num_warps=8, num_stages=3)
    if form == "fp8":
        yield "gate_up 128 columns", replace(base, gate_up=wide)
        yield "gate_up 128 columns, inner fp8", replace(base, gate_up=wide, is_inner_fp8=True)
    narrow = replace(base.gate_up, block_columns=32)
    yield "gate_up 32 columns", replace(base, gate_up=narrow)
    if base.is_combined:
        yield "not combined", replace(base, is_combined=False)
    elif not base.is_planned:
        yield "planned", replace(base, is_planned=True)
        yield "2 parts", replace(base, num_parts=2)
    for rows in (16, 32, 64):
        if not base.is_combined:
            yield f"planned, {rows} rows", replace(both(base, block_rows=rows), is_planned=True)


def both(step: FewRowStep, **changes: object) -> FewRowStep:
    def changed(tiles: ProductTiles) -> ProductTiles:
        return replace(tiles, **changes)  # type: ignore[arg-type]

    return replace(step, gate_up=changed(step.gate_up), down=changed(step.down))


def worker(args: argparse.Namespace) -> None:
    """Print one line per variant: index, microseconds, error, floor, name."""
    form, num_tokens = args.forms, int(args.tokens)
    shape = LayerShape(*(DRY if args.dry else FULL))
    device = torch.device("cpu" if args.dry else "cuda")
    if args.dry:
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from tests.kernels.exact_interpreter import install

        install()
    weights = random_weights(shape, form, device)
    tokens = random_tokens(shape, num_tokens, "uniform", torch.bfloat16, device)
    flush = torch.empty(1 if args.dry else 256 << 20, dtype=torch.uint8, device=device)
    num_hit = tokens.topk_ids.unique().numel()
    size = 1 if form == "fp8" else 2
    floor = num_hit * shape.expert_numbers * size / BYTES_PER_S * 1e6
    kernels = load_few_row_kernels("triton_kernels")
    for index, (name, step) in enumerate(variants(num_tokens, form, shape)):
        if index < args.first or (args.dry and "overlapped" in name):
            continue
        print(f"start|{index}|{name}", flush=True)
        try:
            experts = FewRowExperts(
                weights, kernels, shape.num_experts, step_of=lambda m, k, step=step: step
            )
            error = relative_error(experts, weights, tokens)
            clock = wall_us if args.dry else graph_us
            us = clock(lambda e=experts: e(tokens), 1 if args.dry else 11, flush)
            judged = "ok" if error <= ERROR_LIMITS[form] else "WRONG"
            print(f"done|{index}|{us:.1f}|{floor:.3f}|{error:.4f}|{judged}", flush=True)
        except Exception as failure:
            print(f"fail|{index}|{' '.join(repr(failure).split())[:90]}", flush=True)


def watch(command: list[str], patience: float, deadline: float) -> tuple[int, bool]:
    """Run a worker and print what it reports: the first variant left over, and if it ended."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    index, name = -1, ""
    while True:
        try:
            line = lines.get(timeout=max(min(patience, deadline - time.monotonic()), 0.1))
        except queue.Empty:
            process.kill()
            print(f"  {name:36s} stopped: no report in time", flush=True)
            return index + 1, False
        if line is None:
            code = process.wait()
            if code:
                print(f"  {name:36s} the process ended with {code}", flush=True)
            return index + 1, code == 0
        kind, *fields = line.strip().split("|")
        if kind == "start":
            index, name = int(fields[0]), fields[1]
        elif kind == "done":
            us, floor, error, judged = fields[1:]
            ratio = float(us) / float(floor)
            print(f"  {name:36s} {us:>9} us {ratio:6.2f} x floor  {error} {judged}", flush=True)
        elif kind == "fail":
            print(f"  {name:36s} {fields[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,32,128")
    parser.add_argument("--forms", default="fp8,bf16")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--seconds", type=float, default=88.0)
    parser.add_argument("--patience", type=float, default=15.0)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    deadline = time.monotonic() + args.seconds
    for form in args.forms.split(","):
        for num_tokens in ("1,3" if args.dry else args.tokens).split(","):
            print(f"{form}, {num_tokens} tokens", flush=True)
            first, is_done = 0, False
            while not is_done and time.monotonic() < deadline:
                command = [sys.executable, __file__, "--worker", "--first", str(first)]
                command += ["--tokens", num_tokens, "--forms", form]
                command += ["--dry"] if args.dry else []
                before = first
                first, is_done = watch(command, args.patience, deadline)
                if first <= before:
                    break


FULL = (32, 8, 7168, 2048)
DRY = (4, 2, 256, 128)

if __name__ == "__main__":
    main()
