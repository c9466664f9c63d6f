"""Frozen settings of the MoE layer; each checks itself when it is built."""

import math
from dataclasses import dataclass

from vllm_moe_ep.errors import SettingsError

# fp32 holds every integer below 2**24, so that ids survive the fp32 gather.
MAX_NUM_EXPERTS = 2**24

EXPERT_STRATEGIES = ("auto", "static", "dense", "gated", "grouped", "ragged")
GATHER_PATHS = ("bytes", "fp32")


def _require_at_least(owner: str, low: int, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SettingsError(
                f"{owner}.{name} must be an integer of at least {low}, found {value!r}."
            )


def _require_choice(owner: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SettingsError(f"{owner}.{name} must be one of {', '.join(choices)}, found {value!r}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Shape of one MoE layer, equal on every rank.

    Attributes:
        num_experts: routed experts over all ranks.
        top_k: experts per token.
        hidden_size: model width.
        moe_intermediate_size: width of one routed expert.
        max_num_tokens: largest ``capacity`` a step may use on one rank: local rows plus padding.
        swiglu_limit: clamp of the gate (above) and of the up half (both sides); None: no clamp.

    Raises:
        SettingsError: a field, or a pair of fields, has an impossible value.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    max_num_tokens: int
    swiglu_limit: float | None = None

    def __post_init__(self) -> None:
        _require_at_least(
            "MoEConfig",
            1,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
            max_num_tokens=self.max_num_tokens,
        )
        if self.num_experts >= MAX_NUM_EXPERTS:
            raise SettingsError(
                f"MoEConfig.num_experts must be below {MAX_NUM_EXPERTS}, found {self.num_experts}."
            )
        if self.top_k > self.num_experts:
            raise SettingsError(
                f"MoEConfig.top_k is {self.top_k}, but there are only {self.num_experts} experts; "
                "lower top_k."
            )
        limit = self.swiglu_limit
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise SettingsError(
                f"MoEConfig.swiglu_limit must be a positive finite number or None, found {limit!r}."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EPConfig:
    """How the layer runs, equal on every rank.

    Attributes:
        host_mode: True where shapes may depend on data (eager CPU); False in a traced graph.
        experts: strategy of the expert computation, see ``layers/experts.py``.
        gather: "bytes" packs any dtype as bytes; "fp32" packs one fp32 tensor, for compilers
            that mishandle dtype bitcasts.
        max_gated_rows: "static" (and "auto" in a graph) gates the experts up to this many rows.
        expert_capacity: routed rows per expert of the "grouped" strategy; 0: as many as
            ``automatic_capacity`` finds fit for the step. A step with no more rows than this runs
            dense instead.
        forced_gate: None in use. 0 or 1 overrides every gate, for timing: results are wrong.

    Raises:
        SettingsError: a field has a value it cannot have.
    """

    host_mode: bool = True
    experts: str = "auto"
    gather: str = "bytes"
    max_gated_rows: int = 16
    expert_capacity: int = 0
    forced_gate: int | None = None

    def __post_init__(self) -> None:
        _require_choice("EPConfig", "experts", self.experts, EXPERT_STRATEGIES)
        _require_choice("EPConfig", "gather", self.gather, GATHER_PATHS)
        _require_at_least(
            "EPConfig",
            0,
            max_gated_rows=self.max_gated_rows,
            expert_capacity=self.expert_capacity,
        )
        if self.experts == "ragged" and not self.host_mode:
            raise SettingsError(
                "EPConfig.experts 'ragged' has shapes that depend on data and needs host_mode; "
                "in a graph choose auto, dense, gated or grouped."
            )
        if self.forced_gate not in (None, 0, 1):
            raise SettingsError(
                f"EPConfig.forced_gate must be None, 0 or 1, found {self.forced_gate!r}."
            )
        if self.forced_gate is not None and not self.may_gate:
            raise SettingsError(
                f"EPConfig.forced_gate is {self.forced_gate}, but no expert is gated with experts "
                f"{self.experts!r}{' in host_mode' if self.host_mode else ''}; choose gated."
            )

    @property
    def may_gate(self) -> bool:
        """Whether some step gates its experts."""
        is_static = self.experts == "static" or (self.experts == "auto" and not self.host_mode)
        return self.experts == "gated" or (is_static and self.max_gated_rows > 0)
