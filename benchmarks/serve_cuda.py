"""Whole vLLM engines on one GPU, stock beside static-ep: tokens per second, and do they agree.

    python benchmarks/serve_cuda.py MODEL [--engines stock,ours,stock+compile,ours+compile] [--json]

All engines are up at once, each in a process of its own, and take turns step by step, in an order
that turns round each time: a drift of the machine meets them alike. Figures are medians over the
rounds. MODEL needs a config.json only: weights are random (vLLM's `dummy`, the same in every
engine) unless --load-format says otherwise. The agreement is that of the log-probabilities of a
prompt's own tokens with those of the first engine.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

DECODE_TOKENS = 64
MAX_BATCHED_TOKENS = 8192


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    engines = {name: Engine(name, args) for name in args.engines.split(",")}
    alive = {name: engine for name, engine in engines.items() if engine.answer("load")}
    failed = [name for name in engines if name not in alive]
    _agreement(alive, args)
    for kind, sizes in (("decode", args.decode), ("prefill", args.prefill)):
        for size in (int(part) for part in sizes.split(",")):
            _row(alive, kind, size, args)
    for engine in engines.values():
        engine.stop()
    for name in failed:
        print(f"{name} did not start:\n{engines[name].error}", file=sys.stderr)
    return 1 if failed else 0


class Engine:
    """One engine in a child process, which does what it is told, a call at a time."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.error = ""
        self._process = context.Process(target=_serve, args=(theirs, name, args))
        self._process.start()
        theirs.close()

    def answer(self, *call: Any) -> Any:
        """What the engine returns; None, with `error` set, if it failed."""
        try:
            if call != ("load",):
                self._pipe.send(call)
            kind, value = self._pipe.recv()
        except EOFError:
            kind, value = "error", "its process ended"
        if kind == "error":
            self.error = value
            return None
        return value

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(20)
        self._process.kill()


def _serve(pipe: Connection, name: str, args: argparse.Namespace) -> None:
    """The child: start an engine, then answer `generate` calls until the pipe closes."""
    try:
        llm = _engine(name, args)
        pipe.send(("value", True))
        while True:
            size, length, new_tokens, logprobs = pipe.recv()
            pipe.send(("value", _generate(llm, size, length, new_tokens, logprobs)))
    except EOFError:
        return
    except BaseException:
        pipe.send(("error", traceback.format_exc(limit=-6)))


def _engine(name: str, args: argparse.Namespace) -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    is_compiled = name.endswith("+compile")
    sizes = [int(part) for part in args.decode.split(",")]
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    if not is_compiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    memory = args.kv_cache_gib << 30
    options: dict[str, Any] = {"kv_cache_memory_bytes": memory} if memory else {}
    return LLM(
        args.model,
        load_format=args.load_format,
        max_model_len=args.prompt + 2 * DECODE_TOKENS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=max(sizes),
        gpu_memory_utilization=args.gpu_memory_utilization,
        moe_backend="static_ep" if name.startswith("ours") else args.stock,
        enable_prefix_caching=False,
        compilation_config=compilation,
        **options,
    )


def _generate(llm: Any, size: int, length: int, new_tokens: int, logprobs: bool) -> Any:
    """Seconds that `size` requests took, and the log-probabilities of their prompts' tokens."""
    from vllm import SamplingParams

    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = random.Random(size)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, vocab) for _ in range(length)]} for _ in range(size)
    ]
    params = SamplingParams(
        max_tokens=new_tokens,
        temperature=0,
        ignore_eos=True,
        prompt_logprobs=0 if logprobs else None,
    )
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    if not logprobs:
        return seconds
    found = [
        next(iter(entry.values())).logprob
        for output in outputs
        for entry in output.prompt_logprobs
        if entry
    ]
    return found, [list(output.outputs[0].token_ids) for output in outputs]


def _agreement(engines: dict[str, Engine], args: argparse.Namespace) -> None:
    call = (4, min(256, args.prompt), 16, True)
    found = {name: engine.answer(*call) for name, engine in engines.items()}
    base = next(iter(found.values()), None)
    for name, value in found.items():
        if value is None or base is None:
            print(f"{name}: no answer: {engines[name].error}", flush=True)
            continue
        logprobs, tokens = value
        off = [abs(a - b) for a, b in zip(logprobs, base[0], strict=True)]
        texts = zip(tokens, base[1], strict=True)
        equal = sum(a == b for ours, base_ in texts for a, b in zip(ours, base_, strict=True))
        row = {
            "engine": name,
            "prompt_tokens": len(off),
            "mean_logprob": statistics.fmean(logprobs),
            "mean_difference": statistics.fmean(off),
            "correlation": statistics.correlation(logprobs, base[0]),
            "greedy_equal": f"{equal} of {sum(map(len, tokens))}",
        }
        _print(row, args)


def _row(engines: dict[str, Engine], kind: str, size: int, args: argparse.Namespace) -> None:
    length, new_tokens = (16, DECODE_TOKENS) if kind == "decode" else (args.prompt, 1)
    call = (size, length, new_tokens, False)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(args.rounds + 1):
        order = list(engines) if turn % 2 else list(reversed(engines))
        for name in order:
            seconds = engines[name].answer(*call)
            if seconds is not None and turn:  # the first turn warms up
                times[name].append(seconds)
    tokens = size * (new_tokens if kind == "decode" else length)
    row = {"step": kind, "requests": size}
    row |= {
        name: round(tokens / statistics.median(taken), 1) for name, taken in times.items() if taken
    }
    _print(row, args)


def _print(row: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(row), flush=True)
    else:
        cells = (f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(cells), flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--engines", default="stock,ours,stock+compile,ours+compile")
    parser.add_argument("--stock", default="auto", help="vLLM's own --moe-backend")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--decode", default="1,16,64,256", help="requests at once")
    parser.add_argument("--prefill", default="1,8,32", help="prompts at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prefill's prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.25)
    parser.add_argument("--kv-cache-gib", type=int, default=3, help="0: as vLLM finds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    print(json.dumps(versions), flush=True)
    return args


if __name__ == "__main__":
    sys.exit(main())
