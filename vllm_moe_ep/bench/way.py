"""What a way to compute the experts is, and what is known of it after a measurement."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vllm_moe_ep.stages import RoutedTokens

Way = Callable[[RoutedTokens], Tensor]
OURS = "ours"


@dataclass(frozen=True, slots=True)
class Ways:
    """All that can be measured.

    Attributes:
        by_name: ours first.
        stock: names of those that are the engine's own; the first is what it picks by itself.
        missing: a way that is not to be had here, and why.
        chosen: tokens of a step -> in words, what ours does with it.
        release: gives back what the engine's kernels hold between calls, so that the next call
            takes it again and it can be counted.
    """

    by_name: Mapping[str, Way]
    stock: tuple[str, ...]
    missing: Mapping[str, str]
    chosen: Callable[[int], str]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Result:
    """One way at one size.

    Attributes:
        us: median time, microseconds; None if it failed before.
        error: relative to the fp32 answer.
        workspace_bytes: most memory that one call took, its output and what the engine's kernels
            keep for the next call included.
        failure: a sentence; None if all went well.
    """

    us: float | None = None
    error: float | None = None
    workspace_bytes: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """All ways at one size.

    Attributes:
        chosen: what ours does at this size.
        weight_bytes: of the experts that some row chose.
        flops: of the products.
        floor_us: least time for both on the assumed device; None where none is assumed.
        results: by way.
    """

    form: str
    num_tokens: int
    chosen: str
    weight_bytes: int
    flops: int
    floor_us: float | None
    results: Mapping[str, Result]

    def ratio(self, names: tuple[str, ...]) -> float | None:
        """Time of the fastest of `names` over ours: above 1, ours is faster."""
        ours = self.results[OURS].us
        times = [
            result.us
            for name, result in self.results.items()
            if name in names and result.us is not None
        ]
        return min(times) / ours if times and ours else None
