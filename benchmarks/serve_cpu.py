"""Speed of two static-ep ranks against two stock ranks, on CPU, with real servers in turn.

    python benchmarks/serve_cpu.py [--rounds N] [--wide] [--dtype bfloat16] [--json]

All servers are up at once, and all but the one that is measured are paused: a round of all of
them takes seconds, so that a drift of the machine meets them alike. Figures are medians over the
rounds, ratios are medians of each round's ratio to stock. Without --model it takes the demo's
model from .cache, made if need be. Prompts are pieces of the text that such a model keeps for
tests, since routing follows the text; --random-prompts draws ids instead. --wide serves about
300 M random parameters, where the experts' products take most of the time.
"""

import argparse
import contextlib
import importlib.metadata
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Protocol

from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.demo import cached_model
from vllm_moe_ep.demo.interrupts import termination_as_interrupt
from vllm_moe_ep.demo.server import VllmServer, cpu_environment, stock_flags, vllm_program
from vllm_moe_ep.make_model.wide_model import make_wide_model

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

STOCK = "stock -tp 2"
SERVERS = {
    STOCK: ("-tp", "2"),
    "static-ep -tp 2": ("--moe-backend", "static-ep", "-tp", "2", "--enable-expert-parallel"),
    "static-ep -dp 2": ("--moe-backend", "static-ep", "-dp", "2", "--enable-expert-parallel"),
}

MAX_MODEL_LEN = 1280
SHORT_PROMPT = 32
NUM_NEW_TOKENS = 128

WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""In place of the model's own sizes: 3 MoE layers of 100 M parameters."""


@dataclass(frozen=True)
class Figures:
    """Medians.

    Attributes:
        decode_tokens_per_s: of one request, after its first token.
        of_8_tokens_per_s: of 8 requests at once, prompts included.
        of_32_tokens_per_s: of 32 requests at once.
        first_token_512_ms: time to the first token after a prompt of 512 tokens.
        first_token_1024_ms: after a prompt of 1024.
    """

    decode_tokens_per_s: float
    of_8_tokens_per_s: float
    of_32_tokens_per_s: float
    first_token_512_ms: float
    first_token_1024_ms: float


class Prompts(Protocol):
    def draw(self, num_tokens: int) -> list[int]:
        """Ids of a prompt that was not drawn before."""
        ...


class TextPrompts:
    """Pieces of a text; each starts elsewhere, so that no piece repeats soon.

    Raises:
        ValueError: the text is too short.
    """

    # No divisor of a usual length: the starts wander over the whole text.
    _STEP = 37

    def __init__(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < MAX_MODEL_LEN:
            raise ValueError(
                f"Prompts need a text of {MAX_MODEL_LEN} tokens or more, found {len(token_ids)}: "
                "use --random-prompts."
            )
        self._token_ids = list(token_ids)
        self._start = 0

    def draw(self, num_tokens: int) -> list[int]:
        self._start = (self._start + self._STEP) % (len(self._token_ids) - num_tokens)
        return self._token_ids[self._start : self._start + num_tokens]


class RandomPrompts:
    """Random ids."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._generator = random.Random(seed)
        self._vocab_size = vocab_size

    def draw(self, num_tokens: int) -> list[int]:
        # The first few ids are control tokens.
        return [self._generator.randrange(3, self._vocab_size) for _ in range(num_tokens)]


def measure_once(client: CompletionClient, prompts: Prompts) -> Figures:
    return Figures(
        decode_tokens_per_s=decode_rate(client, prompts),
        of_8_tokens_per_s=concurrent_rate(client, prompts, 8),
        of_32_tokens_per_s=concurrent_rate(client, prompts, 32),
        first_token_512_ms=first_token_seconds(client, prompts.draw(512)) * 1e3,
        first_token_1024_ms=first_token_seconds(client, prompts.draw(1024)) * 1e3,
    )


def decode_rate(client: CompletionClient, prompts: Prompts) -> float:
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


def concurrent_rate(client: CompletionClient, prompts: Prompts, num_requests: int) -> float:
    """Tokens per second of all requests together."""
    drawn = [prompts.draw(SHORT_PROMPT) for _ in range(num_requests)]

    def complete(prompt: Sequence[int]) -> int:
        return len(client.complete(prompt, NUM_NEW_TOKENS, ignore_eos=True).token_ids)

    with ThreadPoolExecutor(num_requests) as pool:
        began = time.monotonic()
        num_tokens = sum(pool.map(complete, drawn))
        return num_tokens / (time.monotonic() - began)


def first_token_seconds(client: CompletionClient, prompt: Sequence[int]) -> float:
    began = time.monotonic()
    for _ in client.stream(prompt, 1, ignore_eos=True):
        return time.monotonic() - began
    raise RuntimeError(f"No token came after a prompt of {len(prompt)} tokens.")


def run_rounds(args: argparse.Namespace, model: Path) -> dict[str, list[Figures]]:
    """One measurement of each server per round, in the same order of rounds."""
    results: dict[str, list[Figures]] = {name: [] for name in servers_of(args)}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in results:
            flags = SERVERS[name]
            print(f"starting {name}", file=sys.stderr, flush=True)
            server = stack.enter_context(make_server(args, model, name, flags))
            prompts = prompts_for(args, model, CompletionClient(server.base_url))
            # Twice: a first request of a shape is slower.
            for _ in range(2):
                measure_once(CompletionClient(server.base_url), prompts)
            server.pause()
            servers[name] = server
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
            # Back and forth, so that no server always follows the same one.
            for name in list(servers)[:: -1 if number % 2 else 1]:
                results[name].append(measure_paused(servers[name], prompts))
    return results


def servers_of(args: argparse.Namespace) -> list[str]:
    return [name for name in SERVERS if "-dp" not in name or not args.no_dp]


def model_for(args: argparse.Namespace) -> Path:
    model = args.model or cached_model(CACHE)
    return make_wide_model(model, CACHE / "deepseek-v3-wide", WIDE) if args.wide else model


def prompts_for(args: argparse.Namespace, model: Path, client: CompletionClient) -> Prompts:
    heldout = model / "heldout.txt"
    if heldout.is_file() and not args.random_prompts:
        return TextPrompts(client.tokenize(heldout.read_text(), add_special_tokens=False))
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    return RandomPrompts(vocab_size, args.seed)


def measure_paused(server: VllmServer, prompts: Prompts) -> Figures:
    """One measurement of a paused server."""
    server.resume()
    client = CompletionClient(server.base_url)
    completion_seconds(client, prompts.draw(SHORT_PROMPT), NUM_NEW_TOKENS)
    figures = measure_once(client, prompts)
    server.pause()
    return figures


def make_server(
    args: argparse.Namespace, model: Path, name: str, flags: Sequence[str]
) -> VllmServer:
    common = ["--dtype", args.dtype, "--max-model-len", str(MAX_MODEL_LEN)]
    if name == STOCK:
        common += stock_flags(args.dtype)
    return VllmServer(
        (vllm_program(), "serve", str(model), *common, "--no-enable-prefix-caching", *flags),
        CACHE / "logs" / f"bench-{name.replace(' ', '-')}.log",
        cpu_environment(num_ranks=2),
    )


def medians(rows: Sequence[Figures]) -> Figures:
    return Figures(*map(statistics.median, zip(*map(astuple, rows), strict=True)))


def ratios_to_stock(results: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Median over the rounds of each figure's ratio to stock's in the same round."""
    return {
        name: medians(
            [
                Figures(*(a / b for a, b in zip(astuple(own), astuple(stock), strict=True)))
                for own, stock in zip(rows, results[STOCK], strict=True)
            ]
        )
        for name, rows in results.items()
    }


def versions() -> dict[str, str]:
    names = ("vllm-moe-ep", "vllm", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{n: importlib.metadata.version(n) for n in names},
    }


def table(results: Mapping[str, Sequence[Figures]]) -> str:
    """One line per server; in brackets the ratio to stock."""
    ratios = ratios_to_stock(results)
    lines = [f"{'':18}" + "".join(f"{field.name:>24}" for field in fields(Figures))]
    for server, rows in results.items():
        pairs = zip(astuple(medians(rows)), astuple(ratios[server]), strict=True)
        cells = (f"{value:.1f} ({ratio:.3f})" for value, ratio in pairs)
        lines.append(f"{server:18}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare static-ep with stock vLLM on CPU.")
    parser.add_argument("--model", type=Path, help="DeepSeek model folder (default: the demo's)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each server")
    parser.add_argument("--wide", action="store_true", help="300 M random parameters")
    parser.add_argument(
        "--no-dp", action="store_true", help="leave out the two data-parallel ranks"
    )
    parser.add_argument("--random-prompts", action="store_true", help="random ids, not text")
    parser.add_argument("--seed", type=int, default=0, help="of random prompts")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with termination_as_interrupt():
        results = run_rounds(args, model_for(args))
    if args.json:
        report = {
            "versions": versions(),
            "dtype": args.dtype,
            "medians": {name: asdict(medians(rows)) for name, rows in results.items()},
            "ratios": {name: asdict(row) for name, row in ratios_to_stock(results).items()},
        }
        print(json.dumps(report, indent=2))
        return
    print(", ".join(f"{name} {version}" for name, version in versions().items()), args.dtype)
    print(table(results))


if __name__ == "__main__":
    main()
