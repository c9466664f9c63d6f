"""`vllm-moe-ep make-model DIR`: write a small DeepSeek-V3 that has learned some Python."""

import argparse
import sys
from pathlib import Path

from .options import DEFAULT_NUM_STEPS, WEIGHT_DTYPES, MakeModelOptions
from .pipeline import make_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="where the model goes; a finished one made with the same options is kept",
    )
    parser.add_argument(
        "--random", action="store_true", help="do not train: random weights, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"training steps; default {DEFAULT_NUM_STEPS}, about two minutes on two cores",
    )
    parser.add_argument(
        "--dtype", choices=WEIGHT_DTYPES, default="float32", help="type of the stored weights"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="CPU threads (default %(default)s); another number gives other roundings",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="make it anew, in place of a model that make-model made",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    """Make the model and print the report; 0 if the model is there, 1 if training diverged."""
    options = MakeModelOptions(
        directory=args.directory,
        random=args.random,
        seed=args.seed,
        num_steps=args.steps,
        weight_dtype=args.dtype,
        num_threads=args.threads,
        force=args.force,
        show_progress=not args.quiet,
    )
    try:
        report = make_model(options)
    except FloatingPointError as error:
        print(f"vllm-moe-ep make-model: {error}", file=sys.stderr)
        return 1
    print(report.summary())
    return 0
