"""Trainium2 cost model of the expert kernels: bytes, engine bounds, and AWS's kernels beside them.

Runs the kernels' own source at full model shapes in the emulator and prints what it counted.
Nothing here is a measurement of a chip. The figures of Trainium2 and their sources are in
`vllm_moe_ep_kernels/nki_emulator/trainium2.py`; a bound is the least time of one resource if it
never waits. Left out: latencies, instruction issue, and the cost of entering a dynamic loop.

AWS's token-generation kernels (nki-library, core/moe/moe_tkg) are modelled by weight bytes alone,
from their public sources and documentation (nki/library/api/moe-tkg): "all-expert" loads each
local expert once whatever the routing; "selective" loads an expert anew for each (token, expert)
pair. On Trainium2 they take fp8 weights with a scale per channel, and no FP4. The selective one is
counted with the pairs that are local to a rank.

Exit status 1 if a bar does not hold: weight bytes read within 2 % of the hit experts' bytes, none
read twice, at least 2 KiB per partition and DMA, and HBM as the bound of the fp8 kernels at 1, 8
and 16 rows.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_moe_ep_kernels.nki.experts import gated_experts
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_emulator import trainium2
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.simulate import Run, simulate

EP_SIZE = 64
NUM_CORES = 2
WEIGHTS = ("w13_codes", "w13_scales", "w2_codes", "w2_scales")
ENGINES = ("hbm", "dma", "tensor", "vector", "scalar", "gpsimd")
BAR_ROWS = (1, 8, 16)
MEBI = 2**20


@dataclass(frozen=True)
class Model:
    name: str
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    formats: tuple[str, ...]

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // EP_SIZE

    @property
    def aws_expert_bytes(self) -> int:
        """fp8, with an fp32 scale per output channel."""
        hidden, width = self.hidden_size, self.moe_intermediate_size
        return 3 * hidden * width + 4 * (2 * width + hidden)


# From the models' public configurations.
MODELS = (
    Model("DeepSeek-V3", 7168, 2048, 256, 8, ("fp8 128x128",)),
    Model("DeepSeek-V4 Flash", 4096, 2048, 256, 6, ("FP4 1x32", "FP4 as fp8 1x128")),
    Model("DeepSeek-V4 Pro", 7168, 3072, 384, 6, ("FP4 1x32", "FP4 as fp8 1x128")),
)
EXTRA = Model("DeepSeek-V3 shapes", 7168, 2048, 256, 8, ("fp8 1x32",))


@dataclass(frozen=True)
class Expert:
    w13: PreparedWeight
    w2: PreparedWeight

    @property
    def num_bytes(self) -> int:
        return self.w13.num_bytes + self.w2.num_bytes


@dataclass(frozen=True)
class Cost:
    """Bounds in microseconds per resource: ``base`` without an expert, ``each`` per hit expert."""

    base: dict[str, float]
    each: dict[str, float]
    serial_tensor_us: float
    read_bytes: int
    is_read_once: bool
    min_partition_bytes: int

    def bounds(self, num_hit: float) -> dict[str, float]:
        return {name: self.base[name] + num_hit * self.each[name] for name in ENGINES}

    def critical(self, num_hit: float) -> str:
        bounds = self.bounds(num_hit)
        return max(bounds, key=lambda name: bounds[name])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    rows = parser.parse_args().rows
    failures: list[str] = []
    for model in (*MODELS, EXTRA):
        for fmt in model.formats:
            print_table(model, fmt, rows, failures)
    print("\nbars: " + ("; ".join(failures) if failures else "all hold"))
    return 1 if failures else 0


def print_table(model: Model, fmt: str, rows: list[int], failures: list[str]) -> None:
    expert = make_expert(model, fmt)
    print(
        f"\n{model.name}, {fmt}, EP {EP_SIZE}: {model.num_local_experts} of {model.num_experts} "
        f"experts a rank, {expert.num_bytes / MEBI:.1f} MiB each"
    )
    print(
        "rows | hit: mean, worst rank | MiB read: ours, all-expert, selective (mean; worst rank) | "
        "us per hit expert: " + ", ".join(ENGINES) + ", tensor if row tiles wait | bound | "
        "us per layer: ours, all-expert, selective (mean; worst rank)"
    )
    for num_rows in rows:
        cost = measure(expert, num_rows)
        print_row(model, cost, num_rows)
        failures += broken_bars(model, fmt, expert, cost, num_rows)


def print_row(model: Model, cost: Cost, num_rows: int) -> None:
    load = routed(model, num_rows)
    aws = model.aws_expert_bytes
    every = model.num_local_experts
    sizes, times = [], []
    for hit, pairs in ((load.mean_hit, load.mean_pairs), (load.worst_hit, load.worst_pairs)):
        num_bytes = (hit * cost.read_bytes, every * aws, pairs * aws)
        sizes.append(" ".join(f"{count / MEBI:.1f}" for count in num_bytes))
        ours = max(cost.bounds(hit).values())
        theirs = [count / NUM_CORES / trainium2.HBM_BYTES_PER_US for count in num_bytes[1:]]
        times.append(" ".join(f"{time:.1f}" for time in (ours, *theirs)))
    engines = " ".join(f"{cost.each[name]:.1f}" for name in ENGINES)
    print(
        f"{num_rows:4} | {load.mean_hit:.2f} {load.worst_hit:.2f} | {'; '.join(sizes)} | "
        f"{engines} {cost.serial_tensor_us:.1f} | {cost.critical(1.0)} | {'; '.join(times)}"
    )


def broken_bars(model: Model, fmt: str, expert: Expert, cost: Cost, num_rows: int) -> Iterator[str]:
    where = f"{model.name} {fmt} at {num_rows} rows"
    if not expert.num_bytes <= cost.read_bytes < 1.02 * expert.num_bytes:
        yield f"{where}: {cost.read_bytes} bytes read of {expert.num_bytes}"
    if not cost.is_read_once:
        yield f"{where}: a weight byte is read twice"
    if cost.min_partition_bytes < trainium2.MIN_DMA_BYTES_PER_PARTITION:
        yield f"{where}: {cost.min_partition_bytes} bytes per partition"
    is_block = fmt in ("fp8 128x128", "FP4 as fp8 1x128")
    if is_block and num_rows in BAR_ROWS and cost.critical(1.0) != "hbm":
        yield f"{where}: bound by {cost.critical(1.0)}"


@dataclass(frozen=True)
class Load:
    """Of one rank, under uniform routing: experts hit, and (row, expert) pairs."""

    mean_hit: float
    worst_hit: float
    mean_pairs: float
    worst_pairs: float


def routed(model: Model, num_rows: int, num_draws: int = 400) -> Load:
    """Means over draws; "worst" is the rank with most, for which the others wait."""
    rng = np.random.default_rng(1)
    scores = rng.random((num_draws, num_rows, model.num_experts))
    ids = np.argpartition(scores, model.top_k, axis=2)[:, :, : model.top_k]
    draws = np.arange(num_draws)[:, None, None]
    counts = np.zeros((num_draws, model.num_experts), np.int64)
    np.add.at(counts, (np.broadcast_to(draws, ids.shape), ids), 1)
    per_rank = counts.reshape(num_draws, EP_SIZE, model.num_local_experts)
    hit, pairs = (per_rank > 0).sum(axis=2), per_rank.sum(axis=2)
    worst_hit, worst_pairs = hit.max(axis=1).mean(), pairs.max(axis=1).mean()
    return Load(float(hit.mean()), float(worst_hit), float(pairs.mean()), float(worst_pairs))


def make_expert(model: Model, fmt: str) -> Expert:
    hidden, width = model.hidden_size, model.moe_intermediate_size
    return Expert(
        make_weight(fmt, 2 * width, hidden, 1, is_interleaved=True),
        make_weight(fmt, hidden, width, NUM_CORES, is_interleaved=False),
    )


def make_weight(fmt: str, n: int, k: int, k_parts: int, is_interleaved: bool) -> PreparedWeight:
    """Some numbers within 240, and scales that keep every sum finite."""
    is_fp4 = fmt == "FP4 1x32"
    rng = np.random.default_rng(2)
    values = rng.integers(0, 0x78, (1, n, k // 2 if is_fp4 else k), dtype=np.uint8)
    block_size = {"fp8 128x128": (128, 128), "FP4 as fp8 1x128": (1, 128)}.get(fmt, (1, 32))
    shape = (1, n // block_size[0], k // block_size[1])
    is_fp32 = fmt == "fp8 128x128"
    scale = np.full(shape, 1e-5, np.float32) if is_fp32 else np.full(shape, 110, np.uint8)
    return prepare(values, scale, block_size, is_fp4, NUM_CORES, k_parts, is_interleaved)


def measure(expert: Expert, num_rows: int) -> Cost:
    idle, hit = run_kernel(expert, num_rows, 0), run_kernel(expert, num_rows, 1)
    before, after = (worst_bounds(run.counts) for run in (idle, hit))
    codes = [
        move for counts in hit.counts for move in counts.transfers if move.tensor.endswith("codes")
    ]
    serial = max(counts.serial_tensor_cycles for counts in hit.counts)
    return Cost(
        before,
        {name: after[name] - before[name] for name in ENGINES},
        serial / trainium2.CYCLES_PER_US["tensor"],
        hit.bytes_read(*WEIGHTS),
        all(
            hit.bytes_read(name) == hit.bytes_covered(name) == hit.inputs[name].data.nbytes
            for name in ("w13_codes", "w2_codes")
        ),
        min(min(move.bytes_per_partition, move.chunk_bytes) for move in codes),
    )


def worst_bounds(cores: tuple[Counts, ...]) -> dict[str, float]:
    return {name: max(counts.bounds_us()[name] for counts in cores) for name in ENGINES}


def run_kernel(expert: Expert, num_rows: int, flag: int) -> Run:
    hidden = expert.w13.k
    arguments = {
        "x": np.ones((num_rows, hidden), np.float32),
        "w13_codes": expert.w13.codes,
        "w13_scales": expert.w13.scales,
        "w2_codes": expert.w2.codes,
        "w2_scales": expert.w2.scales,
        "row_weight": np.ones((1, num_rows), np.float32),
        "flags": np.array([[flag]], np.int32),
        "is_fp4": expert.w13.is_fp4,
        "swiglu_limit": 0.0,
    }
    return simulate(gated_experts, NUM_CORES, arguments)


if __name__ == "__main__":
    sys.exit(main())
