"""Perplexity of a text under a served model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_moe_ep.demo.client import CompletionClient


@dataclass(frozen=True, slots=True)
class TextScore:
    """How well a model predicts a text: mean negative log-likelihood over `num_tokens`."""

    nats_per_token: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nats_per_token)


def score_text(client: CompletionClient, text: str) -> TextScore:
    """Score `text` in windows that fit the model, each after the tokenizer's start tokens.

    A window's very first token has nothing before it and is not scored; that is the start token
    where the tokenizer adds one.

    Raises:
        ValueError: the text has no token to score.
    """
    start = client.tokenize("")
    token_ids = client.tokenize(text, add_special_tokens=False)
    # One place is left for the token that a completion request always generates.
    window_length = client.max_model_len() - len(start) - 1
    logprobs: list[float] = []
    for window in split_windows(token_ids, window_length):
        logprobs += client.prompt_logprobs([*start, *window])[max(0, len(start) - 1) :]
    if not logprobs:
        raise ValueError(f"The text {text[:40]!r} has no token to score: give a longer one.")
    return TextScore(-math.fsum(logprobs) / len(logprobs), len(logprobs))


def split_windows(token_ids: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    """Consecutive windows of `length` tokens; the last may be shorter."""
    for first in range(0, len(token_ids), length):
        yield token_ids[first : first + length]
