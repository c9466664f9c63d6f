"""`vllm-moe-ep demo`."""

import argparse
import math
import os
import sys
from pathlib import Path

from vllm_moe_ep.cli.inputs import path_of
from vllm_moe_ep.demo.client import ClientError
from vllm_moe_ep.demo.demo import DemoError, DemoOptions, run_demo
from vllm_moe_ep.demo.interrupts import termination_as_interrupt
from vllm_moe_ep.demo.server import ServerError
from vllm_moe_ep.errors import SettingsError

_INTERRUPTED = 130
"""The exit status that shells give a program ended by Ctrl-C."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument(
        "--cache-dir",
        type=path_of("--cache-dir"),
        metavar="DIR",
        default=default_cache_dir(),
        help="where the model and the logs are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=path_of("--model"),
        metavar="DIR",
        help="serve this model, with a heldout.txt in its folder, instead of making one",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s"
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        metavar="SECONDS",
        default=300.0,
        help="how long each server may take to become ready (default: %(default)g)",
    )


def default_cache_dir() -> Path:
    """`vllm-moe-ep` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-moe-ep"


def run(args: argparse.Namespace) -> int:
    """Run the demo: 0 if everything in it held, 1 if not, 130 if interrupted.

    Raises:
        SettingsError: an option cannot be used; nothing has been started then.
    """
    if not (math.isfinite(args.startup_timeout) and args.startup_timeout > 0):
        raise SettingsError(
            f"--startup-timeout must be a positive number, found {args.startup_timeout:g}."
        )
    options = DemoOptions(
        cache_dir=args.cache_dir.absolute(),
        model=None if args.model is None else args.model.absolute(),
        dtype=args.dtype,
        startup_timeout_seconds=args.startup_timeout,
    )
    try:
        with termination_as_interrupt():
            run_demo(options)
    except (DemoError, ServerError, ClientError) as error:
        print(f"\nvllm-moe-ep demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nvllm-moe-ep demo: interrupted; no server is left running.", file=sys.stderr)
        return _INTERRUPTED
    print("The demo held.")
    return 0
