"""What `vllm-moe-ep bench` was asked for, checked."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from vllm_moe_ep.bench.measure import Peak
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.plan.model import read_shape

_DEFAULT_SHAPE = LayerShape(num_experts=32, top_k=8, hidden_size=7168, width=2048)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Attributes as the options of the command line; `peak` is None without a floor."""

    platform: str
    shape: LayerShape
    formats: tuple[str, ...]
    tokens: tuple[int, ...]
    routing: str
    repeats: int
    with_all: bool
    peak: Peak | None
    as_json: bool
    plot: Path | None


def options_of(args: argparse.Namespace, platform: str, known: tuple[str, ...]) -> BenchOptions:
    """Check the command line.

    Args:
        platform: "cpu" or "cuda".
        known: formats that can be measured there.

    Raises:
        SettingsError: a value is impossible, or the model is not readable.
        UnsupportedError: the model has no DeepSeek MoE layers.
    """
    formats = tuple(args.formats.split(",")) if args.formats else known
    unknown = [form for form in formats if form not in known]
    if unknown:
        raise SettingsError(
            f"--formats {','.join(unknown)} cannot be measured on {platform}: use "
            f"{', '.join(known)}."
        )
    if args.repeats < 1:
        raise SettingsError(f"--repeats must be at least 1, found {args.repeats}.")
    for option in ("bandwidth_tbs", "fp8_pflops", "bf16_pflops"):
        value = getattr(args, option)
        if not (math.isfinite(value) and value > 0):
            name = option.replace("_", "-")
            raise SettingsError(f"--{name} must be a positive number, found {value}.")
    flops = {"fp8": args.fp8_pflops * 1e15, "bf16": args.bf16_pflops * 1e15}
    return BenchOptions(
        platform=platform,
        shape=_shape(args),
        formats=formats,
        tokens=_sizes(args.tokens),
        routing=args.routing,
        repeats=args.repeats,
        with_all=args.ways,
        # The default figures are an H200's: they say nothing of a CPU.
        peak=Peak(args.bandwidth_tbs * 1e12, flops) if platform == "cuda" else None,
        as_json=args.json,
        plot=args.plot,
    )


def _sizes(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    # Ten digits are more rows than any memory holds.
    if not all(size.isdecimal() and len(size) < 10 and int(size) > 0 for size in sizes):
        raise SettingsError(f"--tokens must be positive integers as 1,8,512, found {text}.")
    return tuple(int(size) for size in sizes)


def _shape(args: argparse.Namespace) -> LayerShape:
    """The model's or the default one, with the flags in place of its sizes."""
    base = _DEFAULT_SHAPE
    if args.model is not None:
        model = read_shape(args.model)
        if args.ep_size < 1 or model.num_experts % args.ep_size:
            raise SettingsError(
                f"--ep-size {args.ep_size} does not divide the model's {model.num_experts} experts."
            )
        base = LayerShape(
            num_experts=model.num_experts // args.ep_size,
            top_k=model.top_k,
            hidden_size=model.hidden_size,
            width=model.moe_intermediate_size,
        )
    elif args.ep_size != 1:
        raise SettingsError("--ep-size goes with --model; else give --num-experts of one rank.")

    def given(value: int | None, default: int) -> int:
        return default if value is None else value

    return LayerShape(
        num_experts=given(args.num_experts, base.num_experts),
        top_k=given(args.top_k, base.top_k),
        hidden_size=given(args.hidden_size, base.hidden_size),
        width=given(args.intermediate_size, base.width),
    )
