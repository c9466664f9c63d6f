"""What ``gated_experts`` and ``grouped_experts`` cost on Trainium2, from sizes alone.

The formulas count the kernels' instructions as the emulator does, one core's, and must give its
numbers exactly; the tests compare the two.
"""

from collections import Counter
from dataclasses import dataclass

from vllm_moe_ep_kernels import trainium2
from vllm_moe_ep_kernels.nki.cast import BATCH, GROUP, row_tiles
from vllm_moe_ep_kernels.nki.experts import MAX_ROWS
from vllm_moe_ep_kernels.nki.prepare import BLOCK, panel_blocks, why_not
from vllm_moe_ep_kernels.nki.product import SCALED_AT_ONCE, is_on_vector, is_one_by_one
from vllm_moe_ep_kernels.trainium2 import bounds_us

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a weight lies in memory.

    Attributes:
        is_fp4: packed FP4, else fp8.
        columns_per_scale: 32 or 128; 0 for a scale per channel.
        is_scale_per_row: else one per 128 rows, in fp32.
        scale_bytes: of a scale per row: 1 for UE8M0, 4 for fp32.
    """

    is_fp4: bool
    columns_per_scale: int
    is_scale_per_row: bool
    scale_bytes: int = _FP32_BYTES


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a call; numbers of a rank whose logical core has ``num_cores`` cores.

    ``has_own_rows``: each expert has ``num_rows`` of its own, by the kernel ``grouped_experts``.
    """

    num_rows: int
    hidden_size: int
    moe_intermediate_size: int
    swiglu_limit: float = 0.0
    row_bytes: int = 2
    num_cores: int = 2
    has_own_rows: bool = False


class Tally:
    """One core's HBM bytes, and cycles per engine."""

    def __init__(self) -> None:
        self.hbm_bytes = 0
        self.cycles: Counter[str] = Counter()

    def run(self, engine: str, elements: int, times: int = 1) -> None:
        """Elementwise instructions over so many elements a partition."""
        self.cycles[engine] += times * max(elements, trainium2.MIN_CYCLES)

    def multiply(self, columns: int, array_rows: int = BLOCK, times: int = 1) -> None:
        """Instructions of the tensor engine on a part of its rows."""
        self.cycles["tensor"] += times * max(columns, trainium2.MIN_CYCLES) * array_rows // BLOCK

    def bounds_us(self) -> dict[str, float]:
        """As ``Counts.bounds_us``."""
        return bounds_us(self.hbm_bytes, self.cycles)


def refusal(shape: ExpertShape, form: WeightForm) -> str | None:
    """Why the kernel does not take this call, or None."""
    if shape.num_rows > MAX_ROWS:
        return f"{shape.num_rows} rows are more than {MAX_ROWS}"
    hidden, width, cores = shape.hidden_size, shape.moe_intermediate_size, shape.num_cores
    return why_not(2 * width, hidden, cores, form.is_fp4) or why_not(
        hidden, width, cores, form.is_fp4, cores
    )


def base_cost(shape: ExpertShape, num_experts: int) -> Tally:
    """A call in which no expert is hit: flags read, sums stored; rows cast if all share them."""
    tally = Tally()
    tally.hbm_bytes += num_experts * _FP32_BYTES
    tally.run("vector", num_experts)
    stored = shape.num_rows * shape.hidden_size * _FP32_BYTES
    if shape.has_own_rows:
        tally.run("vector", num_experts)
        tally.run("gpsimd", shape.num_rows * shape.hidden_size // BLOCK)
        # Zeros here, results for the experts that are hit.
        tally.hbm_bytes += num_experts * stored
    else:
        _rows_in_and_out(tally, shape)
        tally.hbm_bytes += stored
    return tally


def expert_cost(shape: ExpertShape, form: WeightForm) -> Tally:
    """What one hit expert adds."""
    tally, rows = Tally(), shape.num_rows
    if shape.has_own_rows:
        _rows_in_and_out(tally, shape)
    hidden_blocks = shape.hidden_size // BLOCK
    kept_blocks = shape.moe_intermediate_size // BLOCK // shape.num_cores
    tally.run("gpsimd", 2 * kept_blocks * rows)
    _matrix(tally, rows, 2 * kept_blocks, hidden_blocks, 2 * kept_blocks, form)
    tally.hbm_bytes += BLOCK * rows * _FP32_BYTES
    _swiglu(tally, rows, kept_blocks, shape.swiglu_limit > 0)
    _turn(tally, rows, kept_blocks)
    _cast(tally, rows, kept_blocks)
    _matrix(tally, rows, hidden_blocks, kept_blocks, hidden_blocks // shape.num_cores, form)
    return tally


def _rows_in_and_out(tally: Tally, shape: ExpertShape) -> None:
    """Rows read and cast, their sum cleared and later turned to be stored."""
    rows, blocks = shape.num_rows, shape.hidden_size // BLOCK
    tally.hbm_bytes += rows * shape.hidden_size * shape.row_bytes
    if shape.row_bytes != _FP32_BYTES:
        tally.run("scalar", BLOCK, times=len(row_tiles(rows, blocks)))
    _cast(tally, rows, blocks)
    tally.run("gpsimd", blocks * rows)
    _turn(tally, rows, blocks)


def _turn(tally: Tally, rows: int, blocks: int) -> None:
    """fp32 tiles transposed by the tensor engine and copied from PSUM."""
    tiles = len(row_tiles(rows, blocks))
    tally.multiply(trainium2.FP32_TRANSPOSE_PASSES * BLOCK, times=tiles)
    tally.run("scalar", BLOCK, times=tiles)


def _cast(tally: Tally, rows: int, blocks: int) -> None:
    """``cast`` without its fetches."""
    tiles = row_tiles(rows, blocks)
    for start in range(0, len(tiles), BATCH):
        heights = [blocks * rows for _, blocks, _, rows in tiles[start : start + BATCH]]
        numbers, groups = len(heights) * BLOCK, len(heights) * BLOCK // GROUP
        if min(heights) < max(heights):
            tally.run("gpsimd", numbers)
        tally.run("vector", numbers, times=5)
        tally.run("vector", groups, times=5)
        tally.run("gpsimd", groups, times=4)
        for height in heights:
            tally.multiply(height)
            tally.run("scalar", height)


def _matrix(
    tally: Tally, rows: int, blocks: int, k_blocks: int, shared_blocks: int, form: WeightForm
) -> None:
    """``add_matrix``: a core's blocks of n; panels are cut by ``shared_blocks``."""
    units = k_blocks * BLOCK // form.columns_per_scale if form.columns_per_scale else 1
    _scales(tally, blocks * units, form)
    tally.hbm_bytes += blocks * k_blocks * BLOCK * BLOCK // (2 if form.is_fp4 else 1)
    if form.is_fp4:
        per_panel = panel_blocks(shared_blocks // 2, k_blocks * BLOCK)
        panels = blocks // 2 // per_panel
        lanes = per_panel * k_blocks * BLOCK // 4
        tally.run("vector", lanes, times=3 * panels)
        tally.run("gpsimd", lanes, times=panels)
    height = min(form.columns_per_scale or BLOCK, BLOCK)
    tally.multiply(rows, height, times=blocks * k_blocks * BLOCK // height)
    for _ in range(blocks):
        _scaled_sums(tally, rows, units)


def _scales(tally: Tally, count: int, form: WeightForm) -> None:
    if not form.is_scale_per_row:
        # One row of HBM, read four times and spread over the partitions from there.
        tally.hbm_bytes += 4 * count * _FP32_BYTES
        tally.run("vector", count)
        return
    tally.hbm_bytes += BLOCK * count * form.scale_bytes
    if form.scale_bytes == 1:
        tally.run("vector", count // 4, times=4)


def _scaled_sums(tally: Tally, rows: int, units: int) -> None:
    """``add_product`` without its matmuls."""
    if is_one_by_one(rows, units):
        on_vector = sum(is_on_vector(unit) for unit in range(units))
        tally.run("vector", rows, times=on_vector)
        for engine in ("scalar", "gpsimd"):
            tally.run(engine, rows, times=units - on_vector)
        return
    step = min(units, SCALED_AT_ONCE // rows)
    for start in range(0, units, step):
        numbers = min(step, units - start) * rows
        tally.run("vector", numbers)
        if start > 0:
            tally.run("gpsimd", numbers)
    tally.run("vector", step * rows)
    tally.run("gpsimd", rows)


def _swiglu(tally: Tally, rows: int, blocks: int, has_limit: bool) -> None:
    numbers = blocks * rows
    tally.run("scalar", numbers)
    tally.run("vector", numbers, times=5 if has_limit else 3)
    tally.run("vector", rows)
    tally.run("gpsimd", numbers)
