"""Every layout of ranks gives stock vLLM's answers, in float32."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from layouts import LAYOUTS, MAX_MODEL_LEN, Layout
from workload import Reference, Request, Serve, send_at_once

from vllm_moe_ep.demo.client import ClientError, CompletionClient
from vllm_moe_ep.demo.perplexity import score_text
from vllm_moe_ep.demo.server import VllmServer
from vllm_moe_ep.demo.server_log import replaced_layers

pytestmark = pytest.mark.serving

_CANCEL_TRIES = 4
_SETTLE_SECONDS = 30.0


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: layout.name)
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


@pytest.fixture(scope="module")
def server(layout: Layout, reference: Reference, serve: Serve) -> Iterator[VllmServer]:
    # `reference` comes first: its server must be gone before this one takes the CPUs.
    with serve(layout.name, layout.flags, layout.num_ranks) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VllmServer) -> CompletionClient:
    return CompletionClient(server.base_url)


def test_every_rank_replaced_every_layer(server: VllmServer, layout: Layout) -> None:
    reports = replaced_layers(server.read_log())
    assert len(reports) == layout.num_ranks
    for report in reports:
        assert report.num_replaced == report.num_layers == 2, report.text
        assert f"{16 // layout.num_ranks} of 16 experts" in report.text


def test_single_requests(client: CompletionClient, reference: Reference) -> None:
    requests = reference.workload.singles
    reference.assert_same(requests, [request.send(client) for request in requests])


def test_concurrent_requests_of_different_lengths(
    client: CompletionClient, reference: Reference
) -> None:
    requests = reference.workload.concurrent
    assert len({len(request.prompt) for request in requests}) > 8
    reference.assert_same(requests, send_at_once(client, requests))


def test_prompt_of_one_token(client: CompletionClient, reference: Reference) -> None:
    request = reference.workload.one_token
    assert len(request.prompt) == 1
    reference.assert_same([request], [request.send(client)])


def test_longest_prompt(client: CompletionClient, reference: Reference) -> None:
    request = reference.workload.longest
    assert len(request.prompt) == MAX_MODEL_LEN - 1
    reference.assert_same([request], [request.send(client)])


def test_too_long_prompt_is_refused_and_harms_nobody(
    client: CompletionClient, reference: Reference
) -> None:
    longest = reference.workload.longest
    request = replace(longest, prompt=(*longest.prompt, longest.prompt[0]))
    with pytest.raises(ClientError, match="400"):
        request.send(client)
    reference.assert_same([longest], [longest.send(client)])


def test_streaming(client: CompletionClient, reference: Reference) -> None:
    request = reference.workload.singles[0]
    expected = reference.answers[request]
    chunks = list(client.stream(request.prompt, request.num_new_tokens, ignore_eos=True))
    assert len(chunks) > 1
    assert "".join(chunk.text for chunk in chunks) == expected.text
    token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
    assert token_ids == expected.token_ids
    assert chunks[-1].finish_reason == "length"


def test_cancelled_requests(client: CompletionClient, reference: Reference) -> None:
    requests = reference.workload.singles
    room = MAX_MODEL_LEN - max(len(request.prompt) for request in requests)
    # Where four ranks share two CPUs, the API server may hear of the cancellation too late.
    for _ in range(_CANCEL_TRIES):
        num_before = _num_generated(client)
        with ThreadPoolExecutor(len(requests)) as pool:
            jobs = [pool.submit(_cancel_midway, client, request, room) for request in requests]
        for job in jobs:
            job.result()
        num_generated = _num_generated_when_idle(client) - num_before
        reference.assert_same(requests, send_at_once(client, requests))
        if num_generated < len(requests) * room:
            return
    pytest.fail(f"in {_CANCEL_TRIES} tries the cancelled requests ran to their ends")


def _cancel_midway(client: CompletionClient, request: Request, num_new_tokens: int) -> None:
    chunks = client.stream(request.prompt, num_new_tokens, ignore_eos=True)
    assert next(chunks).token_ids
    chunks.close()


def _num_generated(client: CompletionClient) -> float:
    return client.metric("vllm:generation_tokens_total")


def _num_generated_when_idle(client: CompletionClient) -> float:
    """Tokens generated since the server's start, once it has stopped generating."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    before, now = -1.0, _num_generated(client)
    while before != now or client.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "a cancelled request still runs"
        time.sleep(1)
        before, now = now, _num_generated(client)
    return now


def test_perplexity(client: CompletionClient, reference: Reference, heldout: str) -> None:
    score = score_text(client, heldout)
    assert score.num_tokens == reference.score.num_tokens > 1000
    assert score.perplexity == pytest.approx(reference.score.perplexity, rel=1e-3)
