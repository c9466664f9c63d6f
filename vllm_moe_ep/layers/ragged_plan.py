"""The (row, expert) pairs of this rank, sorted by expert; the one host read of a ragged step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_moe_ep.layers.expert_shard import ExpertShard
from vllm_moe_ep.stages import RoutedTokens

# Up to this many ids, lists in Python are faster than a sort in torch.
MAX_LISTED_IDS = 64

# Row counts are rounded up to a power of two, and to a multiple of this above it.
ROW_STEP = 32


def rounded_row_count(count: int) -> int:
    """The number of rows that an expert with `count` routed rows computes.

    oneDNN builds a kernel for each new row count (0.4 ms measured, ten times the product itself
    at small widths), and each step routes other numbers of rows to an expert.
    """
    if count > ROW_STEP:
        return -(-count // ROW_STEP) * ROW_STEP
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """Pairs of some experts.

    Attributes:
        slots: slots with at least one pair, in rising order; repeated after ``split``.
        counts: number of pairs of each entry of ``slots``.
        rows: int64 [pairs], row of each pair.
        weights: fp32 [pairs].
    """

    slots: list[int]
    counts: list[int]
    rows: Tensor
    weights: Tensor

    def batches(self, max_pairs: int) -> Iterator["RaggedPlan"]:
        """Consecutive whole entries, at most ``max_pairs`` pairs together unless one has more."""
        first = start = end = 0
        for index, count in enumerate(self.counts):
            if end > start and end + count - start > max_pairs:
                yield self._part(first, index, start, end)
                first, start = index, end
            end += count
        if end > start:
            yield self._part(first, len(self.slots), start, end)

    def split(self, max_pairs: int) -> "RaggedPlan":
        """The same pairs, with slots of more than ``max_pairs`` of them as several entries."""
        slots: list[int] = []
        counts: list[int] = []
        for slot, count in zip(self.slots, self.counts, strict=True):
            sizes = [min(max_pairs, count - start) for start in range(0, count, max_pairs)]
            slots += [slot] * len(sizes)
            counts += sizes
        return RaggedPlan(slots, counts, self.rows, self.weights)

    def rounded(self, spare_row: int) -> "RaggedPlan":
        """The plan with `rounded_row_count` pairs per slot; the added ones are of `spare_row`."""
        counts = [rounded_row_count(count) for count in self.counts]
        if counts == self.counts:
            return self
        added = torch.tensor(
            [rounded - count for rounded, count in zip(counts, self.counts, strict=True)],
            device=self.rows.device,
        )
        # A pair moves back by what was added to the slots before its own.
        shift = torch.cumsum(added, dim=0) - added
        given = torch.tensor(self.counts, device=self.rows.device)
        positions = torch.arange(len(self.rows), device=self.rows.device)
        positions += shift.repeat_interleave(given, output_size=len(self.rows))
        rows = self.rows.new_full((sum(counts),), spare_row)
        weights = self.weights.new_zeros(sum(counts))
        rows[positions] = self.rows
        weights[positions] = self.weights
        return RaggedPlan(self.slots, counts, rows, weights)

    def _part(self, first: int, last: int, start: int, end: int) -> "RaggedPlan":
        return RaggedPlan(
            self.slots[first:last],
            self.counts[first:last],
            self.rows[start:end],
            self.weights[start:end],
        )


def one_row_weights(tokens: RoutedTokens, shard: ExpertShard) -> dict[int, float]:
    """Slot -> weight of the only row's experts on this rank; an id that repeats adds up."""
    weight_of: dict[int, float] = {}
    ids, weights = tokens.topk_ids.tolist()[0], tokens.topk_weights.tolist()[0]
    for global_id, weight in zip(ids, weights, strict=True):
        slot = shard.slot_of.get(global_id)
        if slot is not None:
            weight_of[slot] = weight_of.get(slot, 0.0) + weight
    return weight_of


def plan_pairs(tokens: RoutedTokens, shard: ExpertShard) -> RaggedPlan:
    """Pairs of this rank's experts; ids without a slot here give none."""
    is_short = tokens.topk_ids.numel() <= MAX_LISTED_IDS
    return _plan_in_lists(tokens, shard) if is_short else _plan_in_tensors(tokens, shard)


def _plan_in_lists(tokens: RoutedTokens, shard: ExpertShard) -> RaggedPlan:
    pairs: dict[int, list[tuple[int, float]]] = {}
    weights = tokens.topk_weights.tolist()
    for row, row_ids in enumerate(tokens.topk_ids.tolist()):
        for position, global_id in enumerate(row_ids):
            slot = shard.slot_of.get(global_id)
            if slot is not None:
                pairs.setdefault(slot, []).append((row, weights[row][position]))
    slots = sorted(pairs)
    flat = [pair for slot in slots for pair in pairs[slot]]
    device = tokens.topk_ids.device
    return RaggedPlan(
        slots,
        [len(pairs[slot]) for slot in slots],
        torch.tensor([row for row, _ in flat], dtype=torch.int64, device=device),
        torch.tensor([weight for _, weight in flat], dtype=torch.float32, device=device),
    )


def _plan_in_tensors(tokens: RoutedTokens, shard: ExpertShard) -> RaggedPlan:
    top_k = tokens.topk_ids.shape[1]
    num_slots = shard.linears.num_slots
    slot_of_pair, order = shard.slots_by_id(tokens.topk_ids).flatten().sort(stable=True)
    counts = torch.bincount(slot_of_pair, minlength=num_slots + 1).tolist()[:num_slots]
    order = order[: sum(counts)]
    slots = [slot for slot in range(num_slots) if counts[slot]]
    return RaggedPlan(
        slots,
        [counts[slot] for slot in slots],
        order // top_k,
        tokens.topk_weights.flatten().index_select(0, order).to(torch.float32),
    )
