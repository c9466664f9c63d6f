"""Trainium2 cost model of the expert kernels: bytes, engine bounds, and AWS's kernels beside them.

Runs the kernels' own source at full model shapes in the emulator and prints what it counted.
Nothing here is a measurement of a chip. The figures of Trainium2 and their sources are in
`vllm_moe_ep_kernels/trainium2.py`; a bound is the least time of one resource if it
never waits. Left out: latencies, instruction issue, and the cost of entering a dynamic loop.

AWS's token-generation kernels (nki-library, core/moe/moe_tkg and core/mlp/mlp_tkg) are modelled
from their public sources and documentation: "all-expert" loads each local expert once whatever the
routing, "selective" an expert anew for each (token, expert) pair local to a rank. Their time is the
longer of weight bytes and matmuls; these hold the rows still and move weights, 512 columns an
instruction, with the array cut into columns for few rows. On Trainium2 they take fp8 weights with
a scale per channel, and no FP4.

"Grouped" is the kernel ``grouped_experts`` with the layer's automatic capacity of rows an expert,
where that is less than the rows, by the formulas of ``nki/expert_cost.py``.

The bars: weight bytes read within 2 % of the hit experts' bytes, none read twice, at least 2 KiB
per partition and DMA, and HBM as the bound of a call that hits one expert at 1, 8 and 16 rows. The
last lines say which of them hold, for every model and form. Some are known not to (``NOT_HELD``);
exit status 1 if that list is wrong.
"""

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from vllm_moe_ep.layers.strategy_experts import automatic_capacity
from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki.expert_cost import ExpertShape, WeightForm, base_cost, expert_cost
from vllm_moe_ep_kernels.nki.prepare import PreparedWeight, prepare
from vllm_moe_ep_kernels.nki_emulator.counts import Counts
from vllm_moe_ep_kernels.nki_emulator.expert_run import WEIGHTS, Expert, broken_bars

EP_SIZE = 64
NUM_CORES = 2
ENGINES = ("hbm", "dma", "tensor", "vector", "scalar", "gpsimd")
MEBI = 2**20
BLOCKS, JOINED, EXACT, FP4, CHANNEL = (
    "fp8 128x128",
    "fp8 1x128",
    "fp8 1x32",
    "FP4 1x32",
    "fp8 per channel",
)
FORMS = {
    BLOCKS: WeightForm(False, 128, False),
    JOINED: WeightForm(False, 128, True, 1),
    EXACT: WeightForm(False, 32, True, 1),
    FP4: WeightForm(True, 32, True, 1),
    CHANNEL: WeightForm(False, 0, True),
}
# Rows at which HBM is to be the bound.
BAR_ROWS = (1, 8, 16)


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

    def aws_expert_us(self, num_rows: int) -> float:
        """AWS's kernels, one expert on one core: the longer of weight bytes and matmuls."""
        reading = self.aws_expert_bytes / NUM_CORES / trainium2.HBM_BYTES_PER_US
        column_tiles = next(128 // width for width in (32, 64, 128) if num_rows <= width)
        tiles = 3 * self.hidden_size * self.moe_intermediate_size / NUM_CORES / (128 * 512)
        cycles = tiles * trainium2.MAX_MOVING / column_tiles
        return max(reading, cycles / trainium2.CYCLES_PER_US["tensor"])


# From the models' public configurations. A form that a model's checkpoint does not have is there to
# show what it would cost: V3 has fp8 128x128, V4 FP4 1x32. "fp8 1x128" is what fp8 1x32 becomes at
# load where that changes no number, and FP4 by `expand_fp4`; "fp8 1x32" is what stays as it was.
# vllm-neuron makes "fp8 per channel" of V4's FP4.
ALL = (BLOCKS, JOINED, EXACT, CHANNEL)
V3, FLASH, PRO = "DeepSeek-V3", "DeepSeek-V4 Flash", "DeepSeek-V4 Pro"
MODELS = (
    Model(V3, 7168, 2048, 256, 8, ALL),
    Model(FLASH, 4096, 2048, 256, 6, (*ALL, FP4)),
    Model(PRO, 7168, 3072, 384, 6, (*ALL, FP4)),
)
# The vector engine is the bound: it scales four partial sums where 128 columns make one, and
# unpacks FP4.
NOT_HELD = {
    *((V3, EXACT, rows) for rows in (8, 16)),
    *((FLASH, EXACT, rows) for rows in (8, 16)),
    *((PRO, EXACT, rows) for rows in (16,)),
    *((model, FP4, rows) for model in (FLASH, PRO) for rows in BAR_ROWS),
}


@dataclass(frozen=True)
class Cost:
    """Bounds in microseconds per resource: ``base`` without an expert, ``each`` per hit expert."""

    base: dict[str, float]
    each: dict[str, float]
    serial_tensor_us: float
    narrow_vector_us: float
    read_bytes: int
    broken: list[str]

    def bounds(self, num_hit: float) -> dict[str, float]:
        return {name: self.base[name] + num_hit * self.each[name] for name in ENGINES}

    def critical(self, num_hit: float) -> str:
        bounds = self.bounds(num_hit)
        return max(bounds, key=lambda name: bounds[name])


class Verdict:
    """Which bars hold.

    Attributes:
        surprises: bars that were to hold and do not, or the other way round.
    """

    def __init__(self) -> None:
        self.surprises: list[str] = []
        self._num_bars = 0
        self._not_held: list[str] = []

    def add(self, model: str, fmt: str, num_rows: int, cost: Cost) -> None:
        """The bars of one model, form and number of rows."""
        where = f"{model} {fmt} at {num_rows} rows"
        self._num_bars += 1
        broken = [f"{where}: {failure}" for failure in cost.broken]
        self.surprises += broken
        self._not_held += broken[:1]
        if num_rows not in BAR_ROWS:
            return
        self._num_bars += 1
        is_held, name = cost.critical(1.0) == "hbm", cost.critical(1.0)
        if not is_held:
            bounds = cost.bounds(1.0)
            times = f"{bounds[name]:.1f} us, HBM {bounds['hbm']:.1f}"
            self._not_held.append(f"{where}: bound by {name}, {times}")
        if is_held == ((model, fmt, num_rows) in NOT_HELD):
            self.surprises.append(where)

    def text(self) -> str:
        """How many bars hold, and one line for each that does not."""
        num_held = self._num_bars - len(self._not_held)
        lines = [f"bars: {num_held} of {self._num_bars} hold"]
        lines += [f"  does not hold: {line}" for line in self._not_held]
        lines += [f"  other than expected: {line}" for line in self.surprises]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    rows = parser.parse_args().rows
    verdict = Verdict()
    for model in MODELS:
        for fmt in model.formats:
            print_table(model, fmt, rows, verdict)
    print("\n" + verdict.text())
    return 1 if verdict.surprises else 0


def print_table(model: Model, fmt: str, rows: list[int], verdict: Verdict) -> None:
    expert = make_expert(model, fmt)
    print(
        f"\n{model.name}, {fmt}, EP {EP_SIZE}: {model.num_local_experts} of {model.num_experts} "
        f"experts a rank, {expert.num_bytes / MEBI:.1f} MiB each"
    )
    print(
        "rows | hit: mean, worst rank | MiB read: ours, all-expert, selective (mean; worst rank) | "
        "us per hit expert: "
        + ", ".join(ENGINES)
        + ", tensor if row tiles wait, vector if narrow | bound | "
        "us per layer: ours, grouped, all-expert, selective (mean; worst rank)"
    )
    for num_rows in rows:
        cost = measure(expert, num_rows)
        print_row(model, fmt, cost, num_rows)
        verdict.add(model.name, fmt, num_rows, cost)


def print_row(model: Model, fmt: str, cost: Cost, num_rows: int) -> None:
    load = routed(model, num_rows)
    every, each = model.num_local_experts, model.aws_expert_us(num_rows)
    sizes, times = [], []
    for hit, pairs in ((load.mean_hit, load.mean_pairs), (load.worst_hit, load.worst_pairs)):
        aws = model.aws_expert_bytes
        num_bytes = (hit * cost.read_bytes, every * aws, pairs * aws)
        sizes.append(" ".join(f"{count / MEBI:.1f}" for count in num_bytes))
        selective = pairs * model.aws_expert_us(1)
        micros = (max(cost.bounds(hit).values()), grouped_us(model, fmt, num_rows, hit))
        times.append(" ".join(f"{time:.1f}" for time in (*micros, every * each, selective)))
    engines = " ".join(f"{cost.each[name]:.1f}" for name in ENGINES)
    print(
        f"{num_rows:4} | {load.mean_hit:.2f} {load.worst_hit:.2f} | {'; '.join(sizes)} | "
        f"{engines} {cost.serial_tensor_us:.1f} {cost.narrow_vector_us:.1f} | "
        f"{cost.critical(1.0)} | {'; '.join(times)}"
    )


def grouped_us(model: Model, fmt: str, num_rows: int, num_hit: float) -> float:
    """A layer by ``grouped_experts``; infinite where each expert would take all rows anyway."""
    capacity = automatic_capacity(num_rows, model.top_k, model.num_experts)
    if capacity >= num_rows:
        return float("inf")
    width = model.moe_intermediate_size
    shape = ExpertShape(capacity, model.hidden_size, width, row_bytes=4, has_own_rows=True)
    base = base_cost(shape, model.num_local_experts).bounds_us()
    each = expert_cost(shape, FORMS[fmt]).bounds_us()
    return max(base[name] + num_hit * each[name] for name in ENGINES)


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
    form = FORMS[fmt]
    rng = np.random.default_rng(2)
    values = rng.integers(0, 0x78, (1, n, k // 2 if form.is_fp4 else k), dtype=np.uint8)
    block_size = (1 if form.is_scale_per_row else 128, form.columns_per_scale or k // k_parts)
    shape = (1, n // block_size[0], k // block_size[1])
    is_byte = form.scale_bytes == 1
    scale = np.full(shape, 110, np.uint8) if is_byte else np.full(shape, 1e-5, np.float32)
    if fmt == EXACT:
        # Too far apart to be joined without a change.
        scale[..., ::2] = 90
    return prepare(values, scale, block_size, form.is_fp4, NUM_CORES, k_parts, is_interleaved)


def measure(expert: Expert, num_rows: int) -> Cost:
    idle, hit = expert.run(num_rows, 0), expert.run(num_rows, 1)
    before, after = (worst_bounds(run.counts) for run in (idle, hit))
    narrow = [max(counts.narrow_vector_cycles for counts in run.counts) for run in (hit, idle)]
    serial = max(counts.serial_tensor_cycles for counts in hit.counts)
    return Cost(
        before,
        {name: after[name] - before[name] for name in ENGINES},
        serial / trainium2.CYCLES_PER_US["tensor"],
        (narrow[0] - narrow[1]) / trainium2.CYCLES_PER_US["vector"],
        hit.bytes_read(*WEIGHTS),
        broken_bars(expert, hit),
    )


def worst_bounds(cores: tuple[Counts, ...]) -> dict[str, float]:
    return {name: max(counts.bounds_us()[name] for counts in cores) for name in ENGINES}


if __name__ == "__main__":
    sys.exit(main())
