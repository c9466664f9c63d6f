"""Every setting of the package: one typed registry, read from the environment and overrides.

A setting is an environment variable `VLLM_MOE_EP_<NAME>`; the same setting in vLLM's
`--additional-config '{"moe_ep": {"<name>": value}}'` takes precedence. No other module reads
the environment for settings.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_moe_ep.errors import SettingsError

PREFIX = "VLLM_MOE_EP_"
OVERRIDE_KEY = "moe_ep"

_LARGEST_INTEGER = 2**31 - 1

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Variable:
    """One setting: its lower-case name, type, default, meaning and allowed values."""

    name: str
    kind: type
    default: bool | int | str
    meaning: str
    choices: tuple[str, ...] = ()
    minimum: int | None = None

    @property
    def env_name(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.kind is bool:
            return "0 or 1"
        if self.choices:
            return ", ".join(self.choices)
        if self.minimum is not None:
            return f"an integer from {self.minimum} to {_LARGEST_INTEGER}"
        return f"an integer up to {_LARGEST_INTEGER}"

    def parse(self, value: object, source: str) -> bool | int | str:
        """Return `value` as this setting's type.

        Text is parsed; a value that already has the type (from a JSON config) is checked.

        Raises:
            SettingsError: the value is not one of the allowed ones; names `source`.
        """
        parsed = self._convert(value)
        if parsed is None:
            found = type(value).__name__ if isinstance(value, list | dict) else repr(value)
            raise SettingsError(f"{source}={found} is not allowed: use {self.allowed}.")
        return parsed

    def _convert(self, value: object) -> bool | int | str | None:
        if self.kind is bool:
            return _to_bool(value)
        if self.kind is int:
            number = _to_int(value)
            if number is None or number > _LARGEST_INTEGER:
                return None
            return None if self.minimum is not None and number < self.minimum else number
        text = value.strip().lower() if isinstance(value, str) else None
        return text if text in self.choices else None


def _to_bool(value: object) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    return False if text in _FALSE else None


def _to_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    try:
        return int(value)
    except ValueError:
        return None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "platform",
        str,
        "auto",
        "Platform whose layer is used; auto takes what the start-up probe finds.",
        choices=("auto", "cpu", "cuda", "neuron"),
    ),
    Variable(
        "allow_stock",
        bool,
        False,
        "Leave a DeepSeek MoE layer that static-ep cannot take on vLLM's own layer, listed once "
        "in the log, instead of refusing the model.",
    ),
    Variable(
        "experts",
        str,
        "auto",
        "How local experts are computed. dense: every expert on all rows; gated: experts without "
        "a routed row are skipped; grouped: each expert on a fixed number of rows, dense when one "
        "has more; static: as on Trainium, gated for few rows, grouped for many where that at "
        "least halves the products, dense between; ragged: each expert on exactly its routed rows "
        "(CPU only); auto: ragged on CPU, elsewhere static.",
        choices=("auto", "static", "dense", "gated", "grouped", "ragged"),
    ),
    Variable(
        "gated_max_rows",
        int,
        16,
        "Most rows of a step that the static experts still compute gated; 0: none.",
        minimum=0,
    ),
    Variable(
        "forced_gate",
        str,
        "off",
        "For timing only: 0 skips every gated expert, 1 computes every one, whatever was routed. "
        "With 0 results are wrong; the log says so at start.",
        choices=("off", "0", "1"),
    ),
    Variable(
        "shared_slices",
        bool,
        True,
        "Split the shared experts' columns over tensor-parallel ranks, whose parts join the one "
        "sum of the step. 0: every rank computes all of them and adds them after the sum.",
    ),
    Variable(
        "expert_capacity",
        int,
        0,
        "Rows per expert of grouped experts, for steps with more rows than that; 0: four times an "
        "even share of the step's routed rows.",
        minimum=0,
    ),
    Variable(
        "placement",
        str,
        "auto",
        "Which experts a rank holds. linear: consecutive ones; round_robin: every n-th, so that "
        "the groups of a grouped router spread over all ranks; auto: round_robin where the router "
        "has groups and tokens are not split, else what --expert-placement-strategy says.",
        choices=("auto", "linear", "round_robin"),
    ),
    Variable(
        "gather",
        str,
        "bytes",
        "How tokens are packed for the all-gather over data-parallel ranks: one byte tensor, or "
        "one fp32 tensor.",
        choices=("bytes", "fp32"),
    ),
    Variable(
        "min_capacity",
        int,
        16,
        "Fewest rows per rank in a data-parallel step; the row capacity is the next power of two "
        "of the largest rank's rows, and never below this.",
        minimum=1,
    ),
    Variable(
        "cuda_path",
        str,
        "auto",
        "Kernels of the experts on NVIDIA. engine: vLLM's Triton kernel; deepgemm: DeepGEMM; "
        "few_rows: our own Triton kernels for small steps, which have not run on hardware yet, and "
        "DeepGEMM for large ones; auto: the one of vLLM's and DeepGEMM that is faster at a step's "
        "size.",
        choices=("auto", "engine", "deepgemm", "few_rows"),
    ),
    Variable(
        "cuda_pass_rows",
        int,
        8192,
        "Most rows that DeepGEMM's experts compute at one time on Hopper. A step with more takes "
        "several passes in the same memory.",
        minimum=128,
    ),
    Variable(
        "hierarchical_all_reduce",
        bool,
        True,
        "Sum over tensor-parallel ranks inside each device first, then across devices; only where "
        "these ranks are all ranks and fill more than one device.",
    ),
    Variable(
        "device_size",
        int,
        0,
        "Ranks that share a device, for the sum above; 0: 4 on neuron, 1 elsewhere.",
        minimum=0,
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings in force. Build with `load_settings`."""

    platform: str
    allow_stock: bool
    experts: str
    gated_max_rows: int
    forced_gate: str
    shared_slices: bool
    expert_capacity: int
    placement: str
    gather: str
    min_capacity: int
    cuda_path: str
    cuda_pass_rows: int
    hierarchical_all_reduce: bool
    device_size: int


def load_settings(
    overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read and validate every setting: defaults, then the environment, then `overrides`.

    Args:
        overrides: the `moe_ep` object of vLLM's `--additional-config`, lower-case names.
        environ: the environment; the process's own when None.

    Raises:
        SettingsError: an unknown name or a value that is not allowed; names the key and what
            is allowed.
    """
    environ = os.environ if environ is None else environ
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise SettingsError(
            f"additional-config key {OVERRIDE_KEY!r} holds {type(overrides).__name__}: give an "
            "object such as {'experts': 'auto'}."
        )
    for name in environ:
        if name.startswith(PREFIX):
            _known(name.removeprefix(PREFIX).lower(), f"environment variable {name}", PREFIX)
    values: dict[str, Any] = {variable.name: variable.default for variable in VARIABLES}
    for variable in VARIABLES:
        if variable.env_name in environ:
            values[variable.name] = variable.parse(environ[variable.env_name], variable.env_name)
    for name, value in overrides.items():
        source = f"additional-config {OVERRIDE_KEY}.{name}"
        values[name] = _known(str(name), source, "").parse(value, source)
    settings = Settings(**values)
    _refuse_contradictions(settings)
    return settings


def given_names(
    overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> set[str]:
    """Names of the settings that somebody set, whatever the value; arguments as above."""
    environ = os.environ if environ is None else environ
    return {
        variable.name
        for variable in VARIABLES
        if variable.env_name in environ or variable.name in (overrides or {})
    }


def _refuse_contradictions(settings: Settings) -> None:
    if settings.forced_gate != "off" and settings.experts not in ("auto", "static", "gated"):
        raise SettingsError(
            f"{PREFIX}FORCED_GATE={settings.forced_gate} (or {OVERRIDE_KEY}.forced_gate) acts on "
            f"gated experts, found {PREFIX}EXPERTS={settings.experts}: use gated."
        )
    if settings.experts == "ragged" and settings.platform in ("cuda", "neuron"):
        raise SettingsError(
            f"{PREFIX}EXPERTS=ragged works on cpu only, found {PREFIX}PLATFORM="
            f"{settings.platform}: use auto, static, dense, gated or grouped."
        )


def _known(name: str, source: str, prefix: str) -> Variable:
    """The variable called `name`; `prefix` is what its spelling at the source starts with."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    spelled = {_spell(known, prefix): known for known in _BY_NAME}
    # Without the prefix, which makes any two names alike.
    near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.75)
    hint = f"did you mean {_spell(near[0], prefix)}? " if near else ""
    raise SettingsError(f"{source} is unknown: {hint}Known are {', '.join(spelled)}.")


def _spell(name: str, prefix: str) -> str:
    return prefix + name.upper() if prefix else name


def settings_table(settings: Settings) -> str:
    """A text table of all settings: variable, value in force, default, allowed, meaning."""
    lines = []
    for variable in VARIABLES:
        value = _shown(getattr(settings, variable.name))
        default = _shown(variable.default)
        mark = "" if value == default else f" (default {default})"
        lines.append(f"{variable.env_name} = {value}{mark}")
        lines.append(f"    allowed: {variable.allowed}")
        lines.append(f"    {variable.meaning}")
    return "\n".join(lines)


def _shown(value: bool | int | str) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


assert {field.name for field in fields(Settings)} == set(_BY_NAME), "registry and Settings differ"
