"""What DeepGEMM serves on which device: a fixed table, one row per compute capability.

A capability that has no row is refused, never taken for its neighbour: 12.1 lacks instructions
that 12.0 has, and a whole major version says nothing about which kernels were built.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Feature = Literal["bf16", "fp8_block", "fp4", "mega"]
FEATURES: tuple[Feature, ...] = ("bf16", "fp8_block", "fp4", "mega")
Capability = tuple[int, int]

# Per capability and feature: None where DeepGEMM serves, else the --moe-backend to use instead.
_INSTEAD: dict[Capability, dict[Feature, str | None]] = {
    (7, 5): {"bf16": "triton", "fp8_block": "marlin", "fp4": "marlin", "mega": "auto"},
    (8, 0): {"bf16": "triton", "fp8_block": "marlin", "fp4": "marlin", "mega": "auto"},
    (8, 6): {"bf16": "triton", "fp8_block": "marlin", "fp4": "marlin", "mega": "auto"},
    (8, 9): {"bf16": "triton", "fp8_block": "triton", "fp4": "marlin", "mega": "auto"},
    (9, 0): {"bf16": None, "fp8_block": None, "fp4": "marlin", "mega": None},
    (10, 0): {"bf16": None, "fp8_block": None, "fp4": None, "mega": None},
    (10, 3): {"bf16": None, "fp8_block": None, "fp4": None, "mega": None},
    (11, 0): {"bf16": "triton", "fp8_block": "triton", "fp4": "marlin", "mega": "auto"},
    (12, 0): {"bf16": "triton", "fp8_block": "triton", "fp4": "marlin", "mega": "auto"},
    (12, 1): {"bf16": "triton", "fp8_block": "triton", "fp4": "marlin", "mega": "auto"},
}
SUPPORTED = tuple(row for row, cells in _INSTEAD.items() if None in cells.values())


@dataclass(frozen=True, slots=True)
class LibraryState:
    """The deep_gemm library as found: "absent", "present" or "broken", and details in words."""

    kind: Literal["absent", "present", "broken"]
    detail: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether DeepGEMM serves; if not, `reason` names device, feature and what to use instead."""

    use: bool
    reason: str = ""

    @property
    def text(self) -> str:
        """The cell of the table: "use" or "refuse: ..."."""
        return "use" if self.use else f"refuse: {self.reason}"


def decide(capabilities: Sequence[Capability], feature: Feature, library: LibraryState) -> Decision:
    """The table's answer for the visible devices; never raises.

    Args:
        capabilities: of every visible device, in device order. All of them count, so that ranks
            on one host, each with another device of the same list, decide alike.
    """
    if not capabilities:
        return _refuse(f"no CUDA device, {feature}: serve on CPU, or make a device visible")
    if len(set(capabilities)) > 1:
        found = ", ".join(f"device {i} is {_shown(c)}" for i, c in enumerate(capabilities))
        return _refuse(
            f"mixed devices ({found}), {feature}: make devices of one kind visible with "
            "CUDA_VISIBLE_DEVICES, so that every rank decides alike"
        )
    capability = capabilities[0]
    device = f"device of compute capability {_shown(capability)}, {feature}"
    row = _INSTEAD.get(capability)
    if row is None:
        known = ", ".join(map(_shown, SUPPORTED))
        return _refuse(f"{device}: unknown, DeepGEMM serves {known}; use --moe-backend auto")
    if row[feature] is not None:
        return _refuse(f"{device}: use --moe-backend {row[feature]}")
    if library.kind == "absent":
        return _refuse(
            f"{device}: {library.detail}; install a vLLM wheel for CUDA (it carries a copy) or "
            "deep_gemm, or use --moe-backend auto"
        )
    if library.kind == "broken":
        return _refuse(
            f"{device}: {library.detail}; repair or uninstall it, or use --moe-backend auto"
        )
    return Decision(True)


def _refuse(reason: str) -> Decision:
    return Decision(False, reason)


def _shown(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
