"""The client reads what the API answers, and perplexity is exp of the mean loss."""

import math
from collections.abc import Callable, Iterator

import pytest

from vllm_moe_ep.demo.client import ClientError, CompletionClient
from vllm_moe_ep.demo.perplexity import score_text, split_windows
from vllm_moe_ep.demo.server import VllmServer, free_port

MakeServer = Callable[..., VllmServer]


@pytest.fixture
def client(make_server: MakeServer) -> Iterator[CompletionClient]:
    with make_server() as server:
        yield CompletionClient(server.base_url)


def test_completion(client: CompletionClient) -> None:
    completion = client.complete([1, 2, 3], max_tokens=4)
    assert completion.text == "cccc"
    assert completion.token_ids == (3, 3, 3, 3)
    assert completion.logprobs == (-0.3,) * 4
    assert completion.finish_reason == "length"


def test_stream_gives_each_chunk(client: CompletionClient) -> None:
    chunks = list(client.stream([5], max_tokens=3))
    assert [chunk.text for chunk in chunks] == ["e", "e", "e"]
    assert [chunk.token_ids for chunk in chunks] == [(5,)] * 3


def test_stream_without_end_mark_is_an_error(client: CompletionClient) -> None:
    with pytest.raises(ClientError, match="DONE"):
        list(client.stream("cut short", max_tokens=2))


def test_refusal_carries_the_servers_words(client: CompletionClient) -> None:
    with pytest.raises(ClientError, match="400 refused"):
        client.complete("refuse", max_tokens=1)


def test_nobody_listening_is_a_client_error() -> None:
    with pytest.raises(ClientError, match="did not answer"):
        CompletionClient(f"http://127.0.0.1:{free_port()}").max_model_len()


def test_metric_sums_label_sets(client: CompletionClient) -> None:
    assert client.metric("x_total") == 5.5
    with pytest.raises(ClientError, match="no metric y"):
        client.metric("y")


def test_perplexity_over_several_windows(client: CompletionClient) -> None:
    text = "abcdefghijklmnop"
    score = score_text(client, text)
    losses = [(ord(c) - 96) / 10 for c in text]
    # Windows of 8 - 1 start token - 1 generated token = 6, each after a start token: all scored.
    assert score.num_tokens == len(text)
    assert score.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-12)


def test_empty_text_has_no_perplexity(client: CompletionClient) -> None:
    with pytest.raises(ValueError, match="no token to score"):
        score_text(client, "")


def test_windows_cover_the_text_once() -> None:
    assert list(split_windows([1, 2, 3, 4, 5], 2)) == [[1, 2], [3, 4], [5]]
