"""Which way of computing the experts is fastest at which size: data, measured per format.

What decides is the mean number of rows per expert: with few, streaming the weights is all that
counts, and every row of a tile beyond an expert's own is wasted.
"""

from dataclasses import dataclass, replace
from typing import Literal

Path = Literal["engine", "few_rows", "deepgemm"]


@dataclass(frozen=True, slots=True)
class Entry:
    """The way to take from `min_rows_per_expert` on.

    Attributes:
        min_rows_per_expert: tokens * top_k / num_experts.
        path: "engine": the engine's own fused experts. "few_rows": our kernels for few rows.
            "deepgemm": the contiguous layout.
        alignment: rows to which an expert's share is padded, which on SM90 is also the tile's
            height; None but with "deepgemm".
    """

    min_rows_per_expert: float
    path: Path
    alignment: int | None = None


_ENGINE = Entry(0.0, "engine")
TABLE: dict[str, tuple[Entry, ...]] = {
    "fp8": (_ENGINE, Entry(24.0, "deepgemm", 64), Entry(72.0, "deepgemm", 128)),
    "bf16": (_ENGINE, Entry(44.0, "deepgemm", 64), Entry(88.0, "deepgemm", 128)),
}
"""By weight format, on SM90. Sorted by `min_rows_per_expert`, the first one 0."""
FEW_ROWS_BELOW = {"fp8": 48.0, "bf16": 88.0}
"""Rows per expert from which the few-row kernels, where they are asked for, leave a step to
DeepGEMM: a guess, since they have not run on hardware."""


def choose(entries: tuple[Entry, ...], num_tokens: int, top_k: int, num_experts: int) -> Entry:
    """The last entry that this step reaches.

    Args:
        num_tokens: rows of all ranks in this step.
        num_experts: over all ranks.
    """
    rows_per_expert = num_tokens * top_k / num_experts
    reached = [entry for entry in entries if entry.min_rows_per_expert <= rows_per_expert]
    return reached[-1]


def first_tokens(entry: Entry, top_k: int, num_experts: int) -> int:
    """The smallest number of tokens that reaches `entry`."""
    return -int(-entry.min_rows_per_expert * num_experts // top_k)


def only(path: Literal["engine", "deepgemm"], entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The entries of one way, reaching down to the smallest step."""
    kept = [entry for entry in entries if entry.path == path]
    first = Entry(0.0, kept[0].path, kept[0].alignment)
    return (first, *kept[1:])


def with_few_rows(below: float, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """The few-row kernels below so many rows per expert, and from there on DeepGEMM's entries."""
    kept = only("deepgemm", entries)
    last = max(i for i, entry in enumerate(kept) if entry.min_rows_per_expert <= below)
    return (
        Entry(0.0, "few_rows"),
        replace(kept[last], min_rows_per_expert=below),
        *kept[last + 1 :],
    )


def with_alignment(entries: tuple[Entry, ...], alignment: int) -> tuple[Entry, ...]:
    """The entries for a library whose alignment cannot be set."""
    return tuple(
        replace(entry, alignment=alignment) if entry.path == "deepgemm" else entry
        for entry in entries
    )
