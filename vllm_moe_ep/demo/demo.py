"""The demo: serve the small model on two expert-parallel ranks, and compare with stock vLLM."""

import dataclasses
import sys
import time
from pathlib import Path

from vllm_moe_ep.cli.inputs import read_text
from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.cpu_binding import available_cpus
from vllm_moe_ep.demo.perplexity import TextScore, score_text
from vllm_moe_ep.demo.server import VllmServer, cpu_environment, stock_flags, vllm_program
from vllm_moe_ep.demo.server_log import replaced_layers
from vllm_moe_ep.errors import SettingsError
from vllm_moe_ep.make_model import MakeModelOptions, make_model

NUM_RANKS = 2
MAX_RELATIVE_DIFFERENCE = 1e-3
"""Of the two perplexities. Roundings cost far less in float32, a wrong expert far more."""

_MODEL_NAME = "deepseek-v3-small"
_MAX_MODEL_LEN = 1024
_MAX_TOKENS = 48
_PROMPTS = (
    "import os\nimport",
    "def __init__(self,",
    "    for key, value in",
    "        raise ValueError(",
    'class Parser:\n    """',
)


class DemoError(Exception):
    """The demo cannot run here, or something in it did not hold."""


@dataclasses.dataclass(frozen=True, slots=True)
class DemoOptions:
    """How to run the demo.

    Attributes:
        cache_dir: holds the model that the demo makes, and the servers' logs.
        model: a model to serve instead; its folder must hold a `heldout.txt`.
        dtype: what both servers compute in.
        startup_timeout_seconds: how long each server may take to become ready.
    """

    cache_dir: Path
    model: Path | None
    dtype: str
    startup_timeout_seconds: float


def run_demo(options: DemoOptions) -> None:
    """Run it and print what happens.

    Raises:
        SettingsError: the model's folder or the cache cannot be used.
        DemoError: two ranks do not fit here, or a result is not as it must be.
        ServerError, ClientError: a server did not start, died, or refused a request.
    """
    _require_cpus()
    model = cached_model(options.cache_dir) if options.model is None else options.model
    text = _heldout_text(model)
    print(f"model: {model}")
    ours = _serve_static_ep(options, model, text)
    stock = _serve_stock(options, model, text)
    _compare(ours, stock)


def cached_model(cache_dir: Path) -> Path:
    """The small trained model in `cache_dir`, made now (about two minutes) if it is not there."""
    directory = cache_dir / _MODEL_NAME
    try:
        return make_model(MakeModelOptions(directory=directory)).directory
    except SettingsError as error:
        raise SettingsError(
            f"{error} Or remove {directory}: the demo then makes its model anew."
        ) from error


def _require_cpus() -> None:
    num_cpus = len(available_cpus())
    if num_cpus < NUM_RANKS:
        raise DemoError(
            f"{NUM_RANKS} ranks need a CPU each, but this process may use {num_cpus}: allow it "
            "more (taskset, the container's CPU set)."
        )


def _heldout_text(model: Path) -> str:
    """The text whose perplexity is compared."""
    try:
        return read_text(model / "heldout.txt", "--model")
    except SettingsError as error:
        raise SettingsError(
            f"{error} It is the text whose perplexity is compared: put one there, or take a model "
            "that `vllm-moe-ep make-model` made."
        ) from error


def _serve_static_ep(options: DemoOptions, model: Path, text: str) -> TextScore:
    flags = ("--moe-backend", "static-ep", "-tp", str(NUM_RANKS), "--enable-expert-parallel")
    server = _server(options, model, "static-ep", NUM_RANKS, flags)
    with _announced(server) as running:
        _print_layers(running)
        client = CompletionClient(running.base_url)
        _print_completions(client)
        return score_text(client, text)


def _serve_stock(options: DemoOptions, model: Path, text: str) -> TextScore:
    with _announced(_server(options, model, "stock", 1, stock_flags(options.dtype))) as running:
        return score_text(CompletionClient(running.base_url), text)


def _server(
    options: DemoOptions, model: Path, name: str, num_ranks: int, flags: tuple[str, ...]
) -> VllmServer:
    common = ("--dtype", options.dtype, "--max-model-len", str(_MAX_MODEL_LEN))
    return VllmServer(
        (vllm_program(), "serve", str(model), *common, *flags),
        options.cache_dir / "logs" / f"demo-{name}.log",
        cpu_environment(num_ranks),
        options.startup_timeout_seconds,
    )


def _announced(server: VllmServer) -> VllmServer:
    print(
        f"\nstarting: {server.command_line}\nits log: {server.log_path}\nwaiting until it is ready"
    )
    sys.stdout.flush()
    return server


def _print_layers(server: VllmServer) -> None:
    """Print which layer each rank runs.

    Raises:
        DemoError: not every rank has all of its MoE layers replaced.
    """
    reports = replaced_layers(server.read_log())
    complete = [r for r in reports if r.num_replaced == r.num_layers > 0]
    if len(complete) != NUM_RANKS:
        raise DemoError(
            f"{NUM_RANKS} ranks should have all MoE layers replaced; the log {server.log_path} "
            f"says so of {len(complete)}: {[r.text for r in reports]}"
        )
    for index, report in enumerate(complete):
        print(f"worker {index + 1} of {NUM_RANKS}: {report.text}")


def _print_completions(client: CompletionClient) -> None:
    client.complete(_PROMPTS[0], max_tokens=4)  # the first request of all is slower
    num_tokens, seconds = 0, 0.0
    for prompt in _PROMPTS:
        began = time.monotonic()
        completion = client.complete(prompt, _MAX_TOKENS)
        seconds += time.monotonic() - began
        num_tokens += len(completion.token_ids)
        print(f"\n--- prompt\n{prompt}\n--- completion\n{completion.text}")
    if num_tokens == 0:
        raise DemoError(f"The server completed none of the prompts {_PROMPTS}.")
    print(
        f"\n{num_tokens} tokens in {seconds:.2f} s: {num_tokens / seconds:.0f} tokens/s, "
        "one request at a time, prompts included"
    )


def _compare(ours: TextScore, stock: TextScore) -> None:
    """Print both perplexities.

    Raises:
        DemoError: they differ by more than `MAX_RELATIVE_DIFFERENCE`.
    """
    difference = abs(ours.perplexity / stock.perplexity - 1)
    line = (
        f"perplexity of {ours.num_tokens} held-out tokens: static-ep on {NUM_RANKS} ranks "
        f"{ours.perplexity:.4f}, stock on one {stock.perplexity:.4f}; they differ by "
        f"{difference:.5%}, allowed are {MAX_RELATIVE_DIFFERENCE:.1%}"
    )
    print(f"\n{line}")
    # Negated, so that a NaN does not pass.
    if ours.num_tokens != stock.num_tokens or not difference <= MAX_RELATIVE_DIFFERENCE:
        raise DemoError(f"The two servers disagree: {line}.")
