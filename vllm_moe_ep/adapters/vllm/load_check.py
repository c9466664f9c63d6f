"""Every expert weight of a layer is loaded, once, with its own shape, before the layer serves.

vLLM leaves a tensor that no checkpoint file holds on uninitialised numbers, without a word.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_moe_ep.adapters.vllm.checkpoint_files import find_tensor
from vllm_moe_ep.errors import CheckpointError

CHECKED_FORMATS = frozenset(
    ("auto", "hf", "safetensors", "pt", "npcache", "mistral")
    + ("fastsafetensors", "instanttensor", "runai_streamer")
)
"""Load formats of vLLM that hand each tensor to the layer's weight loader."""

_V3_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MAX_NAMED = 100


@dataclass(frozen=True, slots=True)
class Piece:
    """One matrix, or its scales, of one expert.

    Attributes:
        parameter: the layer's parameter that holds it, such as w13_weight.
        expert: its number among all experts of the layer.
        shard: w1 (gate), w2 (down) or w3 (up).
    """

    parameter: str
    expert: int
    shard: str


def pieces_of(parameters: Iterable[str], experts: Iterable[int]) -> list[Piece]:
    """All pieces of these parameters and experts."""
    names = tuple(parameters)
    return [
        Piece(name, expert, shard)
        for expert in experts
        for name in names
        for shard in (("w1", "w3") if name.startswith("w13_") else ("w2",))
    ]


@dataclass(slots=True)
class LoadCheck:
    """What has been loaded into one layer.

    Attributes:
        layer_name: of vLLM, the prefix of the tensors' names.
        source: folder or name of the checkpoint.
        wanted: the pieces of this rank's experts.
        is_loading: whether the layer waits for weights, at start and while they are replaced.
        is_first: whether none have been loaded before.
    """

    layer_name: str
    source: str
    wanted: Sequence[Piece]
    is_loading: bool = True
    is_first: bool = True
    _counts: dict[Piece, int] = field(init=False)
    _num_noted: int = field(init=False)

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._num_noted = 0
        self._counts = dict.fromkeys(self.wanted, 0)

    def is_wanted(self, piece: Piece) -> bool:
        """Whether it belongs to this layer and this rank."""
        return piece in self._counts

    def begin_again(self) -> None:
        """New weights are announced, in place of those that were loaded before."""
        is_fresh = self.is_loading and self._num_noted == 0
        self.is_loading, self.is_first = True, False
        if not is_fresh:
            self._forget()

    def examine(self, piece: Piece, parameter: Tensor, loaded: Tensor) -> None:
        """Look at one tensor before it is copied into `parameter` [num_local_experts, ..].

        Raises:
            CheckpointError: its shape is another one than the layer's, or a scale is no number.
        """
        expected = list(parameter.shape[1:])
        if piece.shard != "w2":
            expected[0] //= 2
        if list(loaded.shape) != expected:
            raise self._damaged(piece, f"has shape {list(loaded.shape)}, wanted {expected}")
        if "scale" in piece.parameter and not _all_finite(loaded):
            raise self._damaged(piece, "holds scales that are no finite number")

    def note(self, piece: Piece) -> None:
        """It has been copied."""
        self._counts[piece] += 1
        self._num_noted += 1

    def finish(self) -> None:
        """The layer may be built: nothing is missing."""
        self.is_loading = self.is_first = False
        self._forget()

    def missing(self) -> list[str]:
        """Names of the tensors that were not loaded."""
        return [self.name_of(piece) for piece, count in self._counts.items() if count == 0]

    def repeated(self) -> list[str]:
        """Names of the tensors that were loaded more than once, at start."""
        if not self.is_first:
            return []
        return [self.name_of(piece) for piece, count in self._counts.items() if count > 1]

    def name_of(self, piece: Piece) -> str:
        """The tensor's name as DeepSeek-V3's, or -V4's, checkpoints spell it."""
        prefix = f"{self.layer_name.removesuffix('.routed_experts')}.{piece.expert}"
        suffix = piece.parameter.partition("_")[2]
        if ".ffn." not in self.layer_name:
            return f"{prefix}.{_V3_NAMES[piece.shard]}.{suffix}"
        scale = "scale" if "scale" in suffix else suffix
        return f"{prefix.removeprefix('model.')}.{piece.shard}.{scale}"

    def _damaged(self, piece: Piece, fault: str) -> CheckpointError:
        name = self.name_of(piece)
        file = find_tensor(self.source, name)
        return CheckpointError(f"{file or self.source} is damaged: {name} {fault}.")


def require_complete(checks: Iterable[LoadCheck]) -> None:
    """That nothing is missing in any of these layers, and nothing was loaded twice.

    Raises:
        CheckpointError: lists the names.
    """
    layers = sorted(checks, key=_layer_order)
    missing = [name for check in layers for name in check.missing()]
    if missing:
        raise CheckpointError(
            f"The checkpoint {layers[0].source} lacks expert weights, which would be served as "
            f"random numbers: {_listed(missing)}. Complete it, for example by another download."
        )
    repeated = [name for check in layers for name in check.repeated()]
    if repeated:
        raise CheckpointError(
            f"The checkpoint {layers[0].source} holds expert weights more than once, so that it is "
            f"unclear which of them count: {_listed(repeated)}. Remove the files that do not "
            "belong to it."
        )


def _layer_order(check: LoadCheck) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", check.layer_name)]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    rest = len(names) - _MAX_NAMED
    return f"{shown} and {rest} more" if rest > 0 else shown


def _all_finite(scale: Tensor) -> bool:
    """Of floats, and of UE8M0 exponents held as bytes, of which 255 is no number."""
    if scale.dtype == torch.uint8:
        return not bool((scale == 255).any())
    return bool(scale.float().isfinite().all())
