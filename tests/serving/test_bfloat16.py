"""In bfloat16, where near-ties flip tokens: no farther from stock vLLM on one rank than stock is.

Every server scores the same text, so that all of them see the same context at each token.
"""

import math
import statistics
from collections.abc import Sequence

import pytest
from layouts import LAYOUTS, MAX_MODEL_LEN, STOCK_TP1, STOCK_TP2
from workload import Serve

from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.perplexity import split_windows

pytestmark = pytest.mark.serving

# Two equally good servers differ by chance, since each rounds in its own way: in standard errors
# of the mean difference over the text's tokens.
_STANDARD_ERRORS = 2.0


def test_no_farther_from_one_rank_than_stock_on_two(serve: Serve, heldout: str) -> None:
    flags = {"stock-tp1": STOCK_TP1, "stock-tp2": STOCK_TP2}
    flags |= {f"static-{one.name}": one.flags for one in LAYOUTS if one.name == "tp2-ep"}
    logprobs = {}
    for name, arguments in flags.items():
        num_ranks = 1 if name == "stock-tp1" else 2
        with serve(f"bfloat16-{name}", arguments, num_ranks, dtype="bfloat16") as server:
            logprobs[name] = _score(CompletionClient(server.base_url), heldout)
    stock = _distances(logprobs["stock-tp2"], logprobs["stock-tp1"])
    ours = _distances(logprobs["static-tp2-ep"], logprobs["stock-tp1"])
    excess = [own - other for own, other in zip(ours, stock, strict=True)]
    by_chance = _STANDARD_ERRORS * statistics.stdev(excess) / math.sqrt(len(excess))
    print(
        "mean distance in logprob from stock on one rank: "
        f"stock {statistics.mean(stock):.6f}, ours {statistics.mean(ours):.6f}, "
        f"difference by chance up to {by_chance:.6f}"
    )
    assert statistics.mean(ours) > 0
    assert statistics.mean(excess) <= by_chance


def _score(client: CompletionClient, text: str) -> list[float]:
    token_ids = client.tokenize(text, add_special_tokens=False)
    windows = split_windows(token_ids, MAX_MODEL_LEN - 1)
    return [logprob for window in windows for logprob in client.prompt_logprobs(window)]


def _distances(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(first, second, strict=True)]
