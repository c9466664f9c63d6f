"""The variants of the few-row kernels that are tried on a GPU: one product, then whole steps."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vllm_moe_ep.deepgemm.few_row_table import FewRowStep
from vllm_moe_ep_kernels.product_tiles import GROUP, ProductTiles

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens of the whole steps."""
LOOKED_UP = (1, 32)
"""Tokens for which products without a plan are timed; sizes between take what was best at 32."""
PLANNED = {32: (16,), 64: (16, 32), 128: (32, 64), 256: (64, 128), 512: (64, 128)}
"""Tokens for which planned products are timed -> rows of a tile."""
SHARED_BYTES = 227 << 10
"""Of an SM90 program."""
PREFETCH_BYTES = 1024

# Rows of a tile -> (columns, warps, stages), for tiles whose registers do not spill far.
_GATE_UP: dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    16: (
        (32, 4, (4, 6)),
        (64, 4, (3, 4, 5, 6)),
        (64, 8, (4,)),
        (128, 4, (3, 4)),
        (128, 8, (3, 4, 6)),
    ),
    64: ((64, 4, (3, 4, 5)), (64, 8, (4,)), (128, 8, (3, 4, 5))),
    128: ((64, 4, (3, 4)), (64, 8, (3, 4))),
}
_DOWN: dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    16: (
        (32, 4, (6, 8)),
        (64, 4, (4, 6, 8)),
        (64, 8, (4,)),
        (128, 4, (3, 4, 6)),
        (128, 8, (4, 6)),
    ),
    64: ((64, 4, (4, 6)), (128, 4, (3, 4, 5)), (128, 8, (3, 4, 6))),
    128: ((64, 4, (3, 4)), (128, 8, (3, 4, 5))),
}
_COMBINED = ((16, (6, 8)), (32, (4, 6, 8)), (64, (4, 6)))


@dataclass(frozen=True, slots=True)
class Product:
    """One product alone.

    Attributes:
        name: "gate_up" or "down".
        num_tokens: of the step that it is timed in.
        is_inner_fp8: what lies between the products is fp8.
    """

    name: str
    num_tokens: int
    is_planned: bool
    is_inner_fp8: bool
    tiles: ProductTiles

    @property
    def kernel(self) -> tuple[object, ...]:
        """Equal for products that share a compiled kernel: a planned one knows no size."""
        size = None if self.is_planned else self.num_tokens
        return (self.name, size, self.is_inner_fp8, self.tiles)


def products(form: str) -> Iterator[Product]:
    """Every product that is timed alone."""
    for num_tokens in LOOKED_UP:
        yield from _products(form, num_tokens, 16, is_planned=False)
    for num_tokens, heights in PLANNED.items():
        for rows in heights:
            yield from _products(form, num_tokens, rows, is_planned=True)


def _products(form: str, num_tokens: int, rows: int, is_planned: bool) -> Iterator[Product]:
    number_bytes = 1 if form == "fp8" else 2
    for name, grid in (("gate_up", _GATE_UP), ("down", _DOWN)):
        num_weights = 2 if name == "gate_up" else 1
        for columns, warps, many_stages in grid[16 if rows == 32 else rows]:
            step_bytes = (num_weights * columns + rows) * GROUP * number_bytes
            for stages, has_descriptors in itertools.product(many_stages, (False, True)):
                if stages * step_bytes > SHARED_BYTES:
                    continue
                tiles = ProductTiles(rows, columns, warps, stages, has_descriptors)
                yield Product(name, num_tokens, is_planned, False, tiles)
                # A program of gate_up casts whole groups.
                if form == "fp8" and (name == "down" or columns == GROUP):
                    yield Product(name, num_tokens, is_planned, True, tiles)


def whole_steps(num_tokens: int, times: dict[Product, float]) -> list[FewRowStep]:
    """Steps of the products that were fastest alone, with and without overlapped launches."""
    steps: list[FewRowStep] = []
    if num_tokens <= max(LOOKED_UP):
        steps += _looked_up(num_tokens, times)
    if num_tokens >= 8:
        timed = max(num_tokens, min(PLANNED))
        for rows, is_inner_fp8 in itertools.product(PLANNED[timed], (False, True)):
            pairs = itertools.product(
                _best(times, "gate_up", timed, True, is_inner_fp8, rows)[:2],
                _best(times, "down", timed, True, is_inner_fp8, rows)[:2],
            )
            for gate_up, down in pairs:
                step = FewRowStep(gate_up, down, is_planned=True, is_inner_fp8=is_inner_fp8)
                steps += _overlaps(step)
    return steps


def _looked_up(num_tokens: int, times: dict[Product, float]) -> Iterator[FewRowStep]:
    timed = 1 if num_tokens == 1 else max(LOOKED_UP)
    for is_inner_fp8 in (False, True):
        gate_ups = _best(times, "gate_up", timed, False, is_inner_fp8, 16)[:3]
        downs = _best(times, "down", timed, False, is_inner_fp8, 16)[:2]
        for gate_up, down in itertools.product(gate_ups, downs):
            yield from _overlaps(FewRowStep(gate_up, down, is_inner_fp8=is_inner_fp8))
        if num_tokens <= 8 and gate_ups and downs:
            step = FewRowStep(gate_ups[0], downs[0], num_parts=2, is_inner_fp8=is_inner_fp8)
            yield from _overlaps(step)
    if num_tokens > 2:
        return
    for gate_up in _best(times, "gate_up", 1, False, False, 16)[:1]:
        for columns, many_stages in _COMBINED:
            for stages, has_descriptors in itertools.product(many_stages, (False, True)):
                down = ProductTiles(16, columns, 4, stages, has_descriptors)
                yield from _overlaps(FewRowStep(gate_up, down, is_combined=True))


def _best(
    times: dict[Product, float],
    name: str,
    num_tokens: int,
    is_planned: bool,
    is_inner_fp8: bool,
    rows: int,
) -> list[ProductTiles]:
    wanted = (name, num_tokens, is_planned, is_inner_fp8, rows)
    found = [
        (us, product.tiles)
        for product, us in times.items()
        if wanted
        == (
            product.name,
            product.num_tokens,
            product.is_planned,
            product.is_inner_fp8,
            product.tiles.block_rows,
        )
    ]
    return [tiles for _, tiles in sorted(found, key=lambda entry: entry[0])]


def _overlaps(step: FewRowStep) -> Iterator[FewRowStep]:
    """As it is; overlapped; overlapped, with the second product's weights fetched ahead."""
    yield step
    gate_up, down = (replace(tiles, is_overlapped=True) for tiles in (step.gate_up, step.down))
    yield replace(step, gate_up=gate_up, down=down)
    if not step.is_combined:
        ahead = replace(down, prefetch_bytes=PREFETCH_BYTES)
        yield replace(step, gate_up=gate_up, down=ahead)
