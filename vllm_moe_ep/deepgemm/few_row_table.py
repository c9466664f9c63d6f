"""How the few-row kernels are cut at each size.

These numbers follow from counts of bytes and of places on the chip (docs/perf-notes.md), not from
measurements: the kernels have not run on hardware.
"""

from dataclasses import dataclass

from vllm_moe_ep_kernels.product_tiles import ProductTiles

LOOKUP_PAIRS = 256
"""Most pairs among which each program looks up its own; with more, a launch before sorts them."""


@dataclass(frozen=True, slots=True)
class FewRowStep:
    """How one step is computed.

    Attributes:
        gate_up: programs of the first projection.
        down: programs of the second, with the same block_rows.
        is_planned: one launch sorts the pairs into tiles and, for fp8, casts the tokens' rows;
            without it programs look their pairs up and cast what they load.
        is_combined: the second projection sums over each token's slots itself, which takes one
            launch less and reads an expert's weights once per token.
        num_parts: programs among which the second projection's k is split.
        is_inner_fp8: the first projection's result is stored in fp8; else in bf16, and fp8
            products cast what they load. Needs a gate_up of 128 columns.

    Raises:
        ValueError: the numbers contradict each other.
    """

    gate_up: ProductTiles
    down: ProductTiles
    is_planned: bool = False
    is_combined: bool = False
    num_parts: int = 1
    is_inner_fp8: bool = False

    def __post_init__(self) -> None:
        if self.is_planned and self.gate_up.block_rows != self.down.block_rows:
            raise ValueError(
                "Both products of a planned step take its tiles, found block_rows "
                f"{self.gate_up.block_rows} and {self.down.block_rows}: use one of them."
            )
        if self.is_combined and (self.is_planned or self.num_parts > 1):
            raise ValueError(
                "A combined product is neither planned nor split: use is_planned=False and "
                "num_parts=1."
            )
        if self.is_inner_fp8 and self.gate_up.block_columns != 128:
            raise ValueError(
                "An inner result in fp8 needs a gate_up of 128 columns, found "
                f"{self.gate_up.block_columns}."
            )


def few_row_step(num_tokens: int, top_k: int, num_experts: int, is_fp8: bool) -> FewRowStep:
    """The step for rows of all ranks, spread over experts of all ranks.

    Two programs of 64 + 64 weight rows fit an SM with four fp8 or three bf16 steps under way.
    """
    stages = 5 if is_fp8 else 3
    num_pairs = num_tokens * top_k
    if num_tokens == 1:
        return FewRowStep(
            ProductTiles(16, 64, 4, stages), ProductTiles(16, 32, 4, 6), is_combined=True
        )
    if num_pairs <= LOOKUP_PAIRS:
        rows = 16 if num_pairs <= 4 * num_experts else 32
        return FewRowStep(ProductTiles(rows, 64, 4, stages), ProductTiles(rows, 128, 4, stages))
    rows = 32 if num_pairs <= 16 * num_experts else 64
    return FewRowStep(
        ProductTiles(rows, 64, 4, stages - 1 if is_fp8 else stages),
        ProductTiles(rows, 128, 8 if rows == 64 else 4, stages - 1 if is_fp8 else stages),
        is_planned=True,
    )
