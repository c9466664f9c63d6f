"""Speed of two static-ep ranks against two stock ranks, on CPU, with real servers in turn.

    python benchmarks/serve_cpu.py [--rounds N] [--dtype bfloat16] [--json]

Each round starts every server once, so that a drift of the machine meets all of them. Figures are
medians over all rounds. Without --model it takes the demo's model from .cache, made if need be.
"""

import argparse
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.demo import cached_model
from vllm_moe_ep.demo.interrupts import termination_as_interrupt
from vllm_moe_ep.demo.server import VllmServer, cpu_environment, vllm_program

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

STOCK = "stock -tp 2"
SERVERS = {
    STOCK: ("-tp", "2"),
    "static-ep -tp 2": ("--moe-backend", "static-ep", "-tp", "2", "--enable-expert-parallel"),
    "static-ep -dp 2": ("--moe-backend", "static-ep", "-dp", "2", "--enable-expert-parallel"),
}

MAX_MODEL_LEN = 1024
LONG_PROMPT = 512
SHORT_PROMPT = 32
NUM_NEW_TOKENS = 128
NUM_CONCURRENT = 8


@dataclass(frozen=True)
class Figures:
    """Medians.

    Attributes:
        decode_tokens_per_s: of one request, after its first token.
        concurrent_tokens_per_s: of 8 requests at once, prompts included.
        first_token_ms: time to the first token after a prompt of 512 tokens.
    """

    decode_tokens_per_s: float
    concurrent_tokens_per_s: float
    first_token_ms: float


class PromptSource:
    """Random prompts, none twice."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._generator = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, num_tokens: int) -> list[int]:
        # The first few ids are control tokens.
        return [self._generator.randrange(3, self._vocab_size) for _ in range(num_tokens)]


def measure(client: CompletionClient, prompts: PromptSource, num_repeats: int) -> list[Figures]:
    """`num_repeats` measurements, after one that is dropped."""
    return [measure_once(client, prompts) for _ in range(num_repeats + 1)][1:]


def measure_once(client: CompletionClient, prompts: PromptSource) -> Figures:
    return Figures(
        decode_tokens_per_s=decode_rate(client, prompts),
        concurrent_tokens_per_s=concurrent_rate(
            client, [prompts.draw(SHORT_PROMPT) for _ in range(NUM_CONCURRENT)]
        ),
        first_token_ms=first_token_seconds(client, prompts.draw(LONG_PROMPT)) * 1e3,
    )


def decode_rate(client: CompletionClient, prompts: PromptSource) -> float:
    """Tokens per second of one request after its first token.

    Taken as a difference of two whole requests: on few CPUs a busy API server hands several
    tokens over at once, so that the moments at which chunks arrive say little.
    """
    short = completion_seconds(client, prompts.draw(SHORT_PROMPT), 1)
    long = completion_seconds(client, prompts.draw(SHORT_PROMPT), NUM_NEW_TOKENS + 1)
    return NUM_NEW_TOKENS / (long - short)


def completion_seconds(client: CompletionClient, prompt: Sequence[int], num_tokens: int) -> float:
    began = time.monotonic()
    completion = client.complete(prompt, num_tokens, ignore_eos=True)
    seconds = time.monotonic() - began
    if len(completion.token_ids) != num_tokens:
        raise RuntimeError(f"Asked for {num_tokens} tokens, got {len(completion.token_ids)}.")
    return seconds


def concurrent_rate(client: CompletionClient, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens per second of all requests together."""

    def complete(prompt: Sequence[int]) -> int:
        return len(client.complete(prompt, NUM_NEW_TOKENS, ignore_eos=True).token_ids)

    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.monotonic()
        num_tokens = sum(pool.map(complete, prompts))
        return num_tokens / (time.monotonic() - began)


def first_token_seconds(client: CompletionClient, prompt: Sequence[int]) -> float:
    began = time.monotonic()
    for _ in client.stream(prompt, 1, ignore_eos=True):
        return time.monotonic() - began
    raise RuntimeError(f"No token came after a prompt of {len(prompt)} tokens.")


def run_rounds(args: argparse.Namespace, model: Path) -> dict[str, list[Figures]]:
    """All measurements of each server."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    prompts = PromptSource(vocab_size, args.seed)
    results: dict[str, list[Figures]] = defaultdict(list)
    for number in range(args.rounds):
        for name, flags in SERVERS.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            with make_server(args, model, name, flags) as server:
                client = CompletionClient(server.base_url)
                results[name] += measure(client, prompts, args.repeats)
    return results


def make_server(
    args: argparse.Namespace, model: Path, name: str, flags: Sequence[str]
) -> VllmServer:
    common = ("--dtype", args.dtype, "--max-model-len", str(MAX_MODEL_LEN))
    return VllmServer(
        (vllm_program(), "serve", str(model), *common, "--no-enable-prefix-caching", *flags),
        CACHE / "logs" / f"bench-{name.replace(' ', '-')}.log",
        cpu_environment(num_ranks=2),
    )


def medians(measurements: Sequence[Figures]) -> Figures:
    rows = [asdict(one) for one in measurements]
    return Figures(**{key: statistics.median(row[key] for row in rows) for key in rows[0]})


def versions() -> dict[str, str]:
    names = ("vllm-moe-ep", "vllm", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{n: importlib.metadata.version(n) for n in names},
    }


def table(figures: Mapping[str, Figures]) -> str:
    """One line per server; in brackets the ratio to stock."""
    stock = asdict(figures[STOCK])
    lines = [f"{'':18}" + "".join(f"{name:>32}" for name in stock)]
    for server, row in figures.items():
        cells = (f"{value:.1f} ({value / stock[key]:.2f})" for key, value in asdict(row).items())
        lines.append(f"{server:18}" + "".join(f"{cell:>32}" for cell in cells))
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare static-ep with stock vLLM on CPU.")
    parser.add_argument("--model", type=Path, help="DeepSeek model folder (default: the demo's)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server")
    parser.add_argument("--repeats", type=int, default=7, help="measurements per start")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with termination_as_interrupt():
        results = run_rounds(args, args.model or cached_model(CACHE))
    figures = {name: medians(rows) for name, rows in results.items()}
    if args.json:
        rows = {name: asdict(row) for name, row in figures.items()}
        print(json.dumps({"versions": versions(), "dtype": args.dtype, "medians": rows}, indent=2))
        return
    print(", ".join(f"{name} {version}" for name, version in versions().items()), args.dtype)
    print(table(figures))


if __name__ == "__main__":
    main()
