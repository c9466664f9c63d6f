"""Subcommands of `vllm-moe-ep`; each imports its own module only when it is called."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_moe_ep import __version__
from vllm_moe_ep.errors import SettingsError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand: `module` offers `add_arguments(parser)` and `run(args) -> int`."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("env", "vllm_moe_ep.cli.env", "print every setting with the value in force"),
    Command("doctor", "vllm_moe_ep.cli.doctor", "print what static-ep would run on here, and why"),
    Command(
        "plan",
        "vllm_moe_ep.plan.cli",
        "estimate memory, weight traffic and collective latency of a model on given ranks",
    ),
    Command(
        "bench",
        "vllm_moe_ep.bench.cli",
        "time one MoE layer's experts here, ours beside vLLM's own",
    ),
    Command(
        "make-model",
        "vllm_moe_ep.make_model.cli",
        "write a small DeepSeek-V3 or V4 model for demos and tests",
    ),
    Command(
        "demo",
        "vllm_moe_ep.demo.cli",
        "serve that model on two expert-parallel ranks and compare it with stock vLLM",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit status (2 for a bad setting or unsupported request)."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        args = _parser(chosen).parse_args(words)
        return importlib.import_module(args.module).run(args)
    except (SettingsError, UnsupportedError) as error:
        message = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        message = f"{error.filename} cannot be used: {error.strerror}."
    print(f"vllm-moe-ep {chosen}: {message}", file=sys.stderr)
    return 2


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-moe-ep",
        description="Expert-parallel MoE layers for DeepSeek-style models in vLLM. To serve: "
        "vllm serve MODEL --moe-backend static-ep",
    )
    parser.add_argument("--version", action="version", version=f"vllm-moe-ep {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary.capitalize() + "."
        )
        sub.set_defaults(module=command.module)
        if command.name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
