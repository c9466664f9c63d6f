"""One rank's experts by the way that is fastest at each step's size."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from vllm_moe_ep.deepgemm.path_table import Entry, choose
from vllm_moe_ep.stages import RoutedTokens


@dataclass(frozen=True, slots=True)
class ExpertsBySize:
    """The choice follows from shapes alone: it is the same on every rank and in a CUDA graph.

    Attributes:
        entries: the ways, see ``path_table``.
        num_experts: over all ranks.
        deepgemm: (tokens, alignment) -> [rows, hidden_size].
        engine: tokens -> [rows, hidden_size]; None where no entry asks for it.
        few_rows: likewise.
    """

    entries: tuple[Entry, ...]
    num_experts: int
    deepgemm: Callable[[RoutedTokens, int], Tensor]
    engine: Callable[[RoutedTokens], Tensor] | None
    few_rows: Callable[[RoutedTokens], Tensor] | None = None

    def __call__(self, tokens: RoutedTokens) -> Tensor:
        num_rows, top_k = tokens.topk_ids.shape
        entry = choose(self.entries, num_rows, top_k, self.num_experts)
        if entry.path == "engine":
            assert self.engine is not None, "an entry asks for the engine's experts"
            return self.engine(tokens)
        if entry.path == "few_rows":
            assert self.few_rows is not None, "an entry asks for the few-row kernels"
            return self.few_rows(tokens)
        assert entry.alignment is not None, "an entry of deepgemm has an alignment"
        return self.deepgemm(tokens, entry.alignment)
