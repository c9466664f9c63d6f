"""`vllm-moe-ep make-model DIR`: write a small DeepSeek model that has learned some Python."""

import argparse
import sys

from vllm_moe_ep.cli.inputs import path_of

from .options import DEFAULT_NUM_STEPS, QUANTISATIONS, WEIGHT_DTYPES, MakeModelOptions
from .pipeline import make_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=path_of("DIR"),
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
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument(
        "--dtype", choices=WEIGHT_DTYPES, default="float32", help="type of the stored weights"
    )
    stored.add_argument(
        "--format",
        choices=("bf16", *QUANTISATIONS),
        help="bf16 is --dtype bfloat16. fp8 and fp8-ue8m0: the same model in 128 x 128 blocks "
        "with fp32 or power-of-two scales. v4: a DeepSeek-V4 with the trained experts in FP4, "
        "the rest of its layers random",
    )
    parser.add_argument(
        "--source",
        metavar="DIR",
        type=path_of("--source"),
        help="the float model that is quantised, made there if it is not; default DIR-float",
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
    quantisation = args.format if args.format in QUANTISATIONS else None
    options = MakeModelOptions(
        directory=args.directory,
        random=args.random,
        seed=args.seed,
        num_steps=args.steps,
        weight_dtype=args.dtype if args.format is None else "bfloat16",
        num_threads=args.threads,
        force=args.force,
        show_progress=not args.quiet,
        quantisation=quantisation,
        source=args.source,
    )
    try:
        report = make_model(options)
    except FloatingPointError as error:
        print(f"vllm-moe-ep make-model: {error}", file=sys.stderr)
        return 1
    print(report.summary())
    return 0
