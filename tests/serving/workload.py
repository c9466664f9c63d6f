"""The requests that every server gets, and how answers are compared."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from layouts import MAX_MODEL_LEN

from vllm_moe_ep.demo.client import Completion, CompletionClient
from vllm_moe_ep.demo.perplexity import TextScore
from vllm_moe_ep.demo.server import VllmServer

Serve = Callable[..., VllmServer]
"""The fixture `serve`: (name, flags, num_ranks, dtype="float32", served=the trained model,
**variables) -> a server not yet started."""

MAX_LOGPROB_DIFFERENCE = 1e-4
"""In float32, where only the order of sums differs."""


@dataclass(frozen=True)
class Request:
    """A greedy completion of exactly `num_new_tokens` tokens."""

    prompt: tuple[int, ...]
    num_new_tokens: int

    def send(self, client: CompletionClient) -> Completion:
        return client.complete(self.prompt, self.num_new_tokens, ignore_eos=True)


@dataclass(frozen=True)
class Workload:
    """Named groups of requests, cut from a text."""

    singles: tuple[Request, ...]
    concurrent: tuple[Request, ...]
    one_token: Request
    longest: Request

    def all(self) -> list[Request]:
        return [*self.singles, *self.concurrent, self.one_token, self.longest]


@dataclass(frozen=True)
class Reference:
    """What stock vLLM answers on one rank, one request after the other."""

    workload: Workload
    answers: dict[Request, Completion]
    score: TextScore

    def assert_same(self, requests: Sequence[Request], answers: Sequence[Completion]) -> None:
        """Every token equal to stock vLLM's, and every logprob close to it."""
        assert len(answers) == len(requests) > 0
        for request, answer in zip(requests, answers, strict=True):
            expected = self.answers[request]
            what = f"{len(request.prompt)} prompt tokens, starting with {request.prompt[:8]}"
            assert len(expected.token_ids) == request.num_new_tokens, what
            assert answer.token_ids == expected.token_ids, what
            assert answer.text == expected.text, what
            pairs = zip(answer.logprobs, expected.logprobs, strict=True)
            differences = [abs(ours - stock) for ours, stock in pairs]
            assert len(differences) == request.num_new_tokens, what
            assert max(differences) <= MAX_LOGPROB_DIFFERENCE, f"{what}: {differences}"


def make_workload(token_ids: Sequence[int], generator: random.Random) -> Workload:
    """Prompts from random places of `token_ids`."""

    def cut(length: int, num_new_tokens: int) -> Request:
        first = generator.randrange(len(token_ids) - length)
        return Request(tuple(token_ids[first : first + length]), num_new_tokens)

    lengths = [generator.randint(2, 300) for _ in range(16)]
    return Workload(
        singles=tuple(cut(generator.randint(4, 60), 24) for _ in range(6)),
        concurrent=tuple(cut(length, generator.randint(4, 32)) for length in lengths),
        one_token=cut(1, 16),
        longest=cut(MAX_MODEL_LEN - 1, 1),
    )


def send_at_once(client: CompletionClient, requests: Sequence[Request]) -> list[Completion]:
    """All requests in flight together; answers in their order."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: request.send(client), requests))
