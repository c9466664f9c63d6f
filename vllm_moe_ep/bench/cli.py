"""`vllm-moe-ep bench`: one MoE layer's routed experts on this machine, checked and timed."""

import argparse
import contextlib
import importlib.util
import json
import platform as python_platform
from dataclasses import asdict

import torch

from vllm_moe_ep import __version__
from vllm_moe_ep.bench import cpu_ways, cuda_ways
from vllm_moe_ep.bench.inputs import ROUTINGS, random_weights
from vllm_moe_ep.bench.measure import Bench, measure
from vllm_moe_ep.bench.options import BenchOptions, options_of
from vllm_moe_ep.bench.plot import check_plotting, plot
from vllm_moe_ep.bench.table import as_json, header, lines
from vllm_moe_ep.bench.way import Row, Ways
from vllm_moe_ep.cli.inputs import path_of
from vllm_moe_ep.config import MoEConfig
from vllm_moe_ep.deepgemm.hopper_experts import HopperWeights
from vllm_moe_ep.errors import UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's options."""
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model", type=path_of("--model"), metavar="CONFIG", help="config.json or its folder"
    )
    parser.add_argument("--ep-size", type=int, default=1, help="ranks that share its experts")
    parser.add_argument("--num-experts", type=int, help="on this rank; default 32")
    parser.add_argument("--top-k", type=int, help="default 8, all on this rank")
    parser.add_argument("--hidden-size", type=int, help="default 7168")
    parser.add_argument("--intermediate-size", type=int, help="of one expert; default 2048")
    parser.add_argument("--tokens", default="1,8,32,128,512,2048,8192", help="rows of a step")
    parser.add_argument("--formats", help="default: fp8,bf16 on cuda; bf16,fp32 on cpu")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument("--ways", action="store_true", help="time each of our own ways, too")
    parser.add_argument("--repeats", type=int, default=15, help="the median counts")
    for option, value in (("bandwidth-tbs", 4.3), ("fp8-pflops", 1.5), ("bf16-pflops", 0.79)):
        parser.add_argument(
            f"--{option}", type=float, default=value, help="of the floor; default: an H200's"
        )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--plot", type=path_of("--plot"), metavar="FILE", help="curves; needs matplotlib"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 if some way failed or computed something wrong, else 0.

    Raises:
        SettingsError: an option has an impossible value.
        UnsupportedError: nothing can be measured here; says what to do.
    """
    if args.plot is not None:
        check_plotting(args.plot)
    known = cpu_ways.FORMATS if args.platform == "cpu" else cuda_ways.FORMATS
    options = options_of(args, args.platform, known)
    if options.platform == "cuda":
        _require_cuda()
    torch.manual_seed(0)
    rows: list[Row] = []
    with torch.inference_mode(), _engine_state(options):
        _print_head(options)
        for form in options.formats:
            rows += _measure_format(options, form)
    if options.plot is not None:
        plot(rows, options.plot, f"{asdict(options.shape)}, {options.routing} routing")
    has_failed = any(result.failure for row in rows for result in row.results.values())
    return 1 if has_failed else 0


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"No CUDA device is visible to torch {torch.__version__}: run it on a machine with a "
            "Hopper GPU and vLLM for CUDA, or measure the CPU layer with --platform cpu."
        )
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("vLLM is not installed: pip install 'vllm-moe-ep[cuda]'.")


def _engine_state(options: BenchOptions) -> contextlib.AbstractContextManager[None]:
    if importlib.util.find_spec("vllm") is None:
        return contextlib.nullcontext()
    from vllm_moe_ep.adapters.vllm.lone_layer import engine_state

    return engine_state(torch.device(options.platform))


def _measure_format(options: BenchOptions, form: str) -> list[Row]:
    device = torch.device(options.platform)
    bench = Bench(options.shape, form, options.routing, options.repeats, device, options.peak)
    weights = random_weights(options.shape, form, device)
    ways = _ways(options, form, weights)
    if not options.as_json:
        print(header(ways), flush=True)
    for name, reason in ways.missing.items():
        left_out = {"format": form, "left_out": name, "reason": reason}
        text = json.dumps(left_out) if options.as_json else f"    without {name}: {reason}"
        print(text, flush=True)
    rows = []
    for num_tokens in options.tokens:
        rows.append(measure(bench, ways, weights, num_tokens))
        if options.as_json:
            print(json.dumps(as_json(rows[-1], ways)), flush=True)
        else:
            print("\n".join(lines(rows[-1], ways)), flush=True)
    return rows


def _ways(options: BenchOptions, form: str, weights: HopperWeights) -> Ways:
    shape = options.shape
    config = MoEConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.width,
        max_num_tokens=max(options.tokens),
    )
    if options.platform == "cpu":
        return cpu_ways.cpu_ways(config, weights, options.with_all)
    return cuda_ways.cuda_ways(config, form, weights, options.with_all)


def _print_head(options: BenchOptions) -> None:
    """One JSON line: versions, device and shape."""
    versions = {"vllm-moe-ep": __version__, "torch": torch.__version__}
    if importlib.util.find_spec("vllm") is not None:
        from vllm_moe_ep.adapters.vllm.lone_layer import VERSION

        versions["vllm"] = VERSION
    device = python_platform.processor() or python_platform.machine()
    if options.platform == "cuda":
        from vllm_moe_ep.deepgemm.library import deep_gemm

        bundle = deep_gemm("bf16")
        versions |= {"deep_gemm": bundle.description, "nvcc": str(bundle.toolkit.version)}
        device = torch.cuda.get_device_name()
    else:
        versions["threads"] = str(torch.get_num_threads())
    head = {"versions": versions, "device": device, "shape": asdict(options.shape)}
    print(json.dumps(head | {"routing": options.routing}), flush=True)
