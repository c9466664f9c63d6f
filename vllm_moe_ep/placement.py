"""Static placement of experts: global id <-> (ep_rank, local id). Pure Python."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_moe_ep.errors import SettingsError

NO_EXPERT = -1


@dataclass(frozen=True, slots=True)
class ExpertLocation:
    """Where one expert lives."""

    ep_rank: int
    local_id: int


@dataclass(frozen=True)
class LocalExperts:
    """One rank's view: ``global_ids[local_id]`` is the global id of that local expert.

    Raises:
        SettingsError: an id is out of range or appears twice.
    """

    num_experts: int
    global_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for global_id in self.global_ids:
            if not 0 <= global_id < self.num_experts:
                raise SettingsError(
                    f"A local expert has the global id {global_id}; ids run from 0 to "
                    f"{self.num_experts - 1}."
                )
        if len(set(self.global_ids)) != len(self.global_ids):
            raise SettingsError(f"A global expert id is listed twice: {self.global_ids}.")

    @classmethod
    def from_expert_map(cls, expert_map: Iterable[int]) -> "LocalExperts":
        """Build from a table of one entry per global id: the local id, or -1 for elsewhere.

        Args:
            expert_map: [num_experts] integers (a list or an int32 tensor).

        Raises:
            SettingsError: the local ids are not 0, 1, ... without gap or repetition.
        """
        table = [int(local_id) for local_id in expert_map]
        owned = {local: glob for glob, local in enumerate(table) if local != NO_EXPERT}
        num_owned = sum(local != NO_EXPERT for local in table)
        if sorted(owned) != list(range(num_owned)):
            raise SettingsError(
                f"expert_map must give each local id from 0 to {num_owned - 1} once, found "
                f"{[local for local in table if local != NO_EXPERT]}."
            )
        return cls(len(table), tuple(owned[local] for local in range(num_owned)))

    @property
    def num_local_experts(self) -> int:
        return len(self.global_ids)

    @cached_property
    def local_id_of(self) -> dict[int, int]:
        """Global id -> local id, of this rank's experts only."""
        return {glob: local for local, glob in enumerate(self.global_ids)}

    def expert_map(self) -> list[int]:
        """[num_experts] local ids, -1 for experts of other ranks."""
        return [self.local_id_of.get(glob, NO_EXPERT) for glob in range(self.num_experts)]


@dataclass(frozen=True)
class ExpertPlacement:
    """All ranks' experts: ``global_ids_by_rank[ep_rank][local_id]`` is a global id.

    Raises:
        SettingsError: some expert is not placed exactly once.
    """

    num_experts: int
    global_ids_by_rank: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        placed = sorted(glob for ids in self.global_ids_by_rank for glob in ids)
        if placed != list(range(self.num_experts)):
            raise SettingsError(
                f"Each of {self.num_experts} experts must be placed exactly once, found {placed}."
            )

    @classmethod
    def linear(cls, num_experts: int, ep_size: int) -> "ExpertPlacement":
        """Contiguous blocks: rank r starts at base * r + min(r, rem), the first rem ranks own one
        expert more (base, rem = divmod(num_experts, ep_size)). Ranks may own none."""
        _check_sizes(num_experts, ep_size)
        base, rem = divmod(num_experts, ep_size)
        starts = [base * rank + min(rank, rem) for rank in range(ep_size + 1)]
        blocks = (range(starts[rank], starts[rank + 1]) for rank in range(ep_size))
        return cls(num_experts, tuple(tuple(block) for block in blocks))

    @classmethod
    def round_robin(cls, num_experts: int, ep_size: int) -> "ExpertPlacement":
        """Expert e lives on rank e % ep_size as local id e // ep_size."""
        _check_sizes(num_experts, ep_size)
        stripes = (range(rank, num_experts, ep_size) for rank in range(ep_size))
        return cls(num_experts, tuple(tuple(stripe) for stripe in stripes))

    @property
    def ep_size(self) -> int:
        return len(self.global_ids_by_rank)

    @cached_property
    def _locations(self) -> Sequence[ExpertLocation]:
        where = {
            glob: ExpertLocation(rank, local)
            for rank, ids in enumerate(self.global_ids_by_rank)
            for local, glob in enumerate(ids)
        }
        return [where[glob] for glob in range(self.num_experts)]

    def location(self, global_id: int) -> ExpertLocation:
        """Rank and local id of one expert.

        Raises:
            ValueError: there is no such expert.
        """
        if not 0 <= global_id < self.num_experts:
            raise ValueError(
                f"Expert {global_id} does not exist; ids run from 0 to {self.num_experts - 1}."
            )
        return self._locations[global_id]

    def local(self, ep_rank: int) -> LocalExperts:
        """The view of one rank.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= ep_rank < self.ep_size:
            raise ValueError(f"ep_rank {ep_rank} is outside 0 to {self.ep_size - 1}.")
        return LocalExperts(self.num_experts, self.global_ids_by_rank[ep_rank])


def _check_sizes(num_experts: int, ep_size: int) -> None:
    if num_experts < 1 or ep_size < 1:
        raise SettingsError(
            "A placement needs at least one expert and one rank, found "
            f"{num_experts} experts and {ep_size} ranks."
        )
