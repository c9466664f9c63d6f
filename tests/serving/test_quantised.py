"""Quantised checkpoints, served in bf16, against Hugging Face's fp32 model of the same numbers."""

import copy
import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantised import correlation, float_model, loss_against_best, token_logprobs
from layouts import CONFIGS, MAX_MODEL_LEN
from workload import Serve

from vllm_moe_ep.demo.client import CompletionClient
from vllm_moe_ep.demo.perplexity import split_windows
from vllm_moe_ep.demo.server import VllmServer
from vllm_moe_ep.demo.server_log import replaced_layers

pytestmark = pytest.mark.serving

MAX_FARTHER = 3
MIN_CORRELATION = 0.99

MakeModel = Callable[[str], Path]


@dataclass(frozen=True)
class Served:
    """One server: which checkpoint, how, and how far its greedy choices may fall behind.

    Attributes:
        reloaded: the checkpoint whose weights replace the first one's while it runs.
        max_loss: nats by which the reference may prefer another token to the one chosen.
    """

    quantisation: str
    reloaded: str
    config: str
    num_layers: int
    num_experts: int
    max_loss: float
    flags: tuple[str, ...] = ()


# Both kinds of scales in both layouts, one loaded at start and one while serving.
SERVERS = (
    Served("fp8", "fp8-ue8m0", "cpu-tp2-ep.yaml", 2, 16, 0.1),
    Served("fp8-ue8m0", "fp8", "cpu-dp2-ep.yaml", 2, 16, 0.1, ("--enforce-eager",)),
    Served("v4", "v4", "cpu-tp2-ep.yaml", 3, 64, 0.3),
)


@pytest.fixture(scope="module", params=SERVERS, ids=lambda one: f"{one.quantisation}-{one.config}")
def served(request: pytest.FixtureRequest) -> Served:
    chosen: Served = request.param
    return chosen


@pytest.fixture(scope="module")
def server(served: Served, serve: Serve, quantised_model: MakeModel) -> Iterator[VllmServer]:
    directory = quantised_model(served.quantisation)
    name = f"{served.quantisation}-{Path(served.config).stem}"
    flags = ("--config", str(CONFIGS / served.config), *served.flags)
    with serve(name, flags, 2, "bfloat16", directory, VLLM_SERVER_DEV_MODE="1") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VllmServer) -> CompletionClient:
    return CompletionClient(server.base_url)


@pytest.fixture(scope="session")
def reference(quantised_model: MakeModel) -> Callable[[str], Any]:
    return cache(lambda quantisation: float_model(quantised_model(quantisation)))


@pytest.fixture(scope="module")
def windows(client: CompletionClient, heldout: str) -> list[list[int]]:
    token_ids = client.tokenize(heldout, add_special_tokens=False)
    return [list(window) for window in split_windows(token_ids, MAX_MODEL_LEN - 1)]


def scores(client: CompletionClient, windows: list[list[int]]) -> torch.Tensor:
    """All windows at once, so that data-parallel ranks work on different ones."""
    with ThreadPoolExecutor(len(windows)) as pool:
        found = list(pool.map(client.prompt_logprobs, windows))
    return torch.tensor([value for window in found for value in window], dtype=torch.float64)


def test_every_rank_replaced_every_layer(server: VllmServer, served: Served) -> None:
    reports = replaced_layers(server.read_log())
    assert len(reports) == 2
    for report in reports:
        assert report.num_replaced == report.num_layers == served.num_layers, report.text
        assert f"{served.num_experts // 2} of {served.num_experts} experts" in report.text
    used = "FP4 experts dequantised" if served.quantisation == "v4" else "grouped CPU kernel"
    assert used in server.read_log()


def test_logprobs_of_a_text(
    client: CompletionClient,
    served: Served,
    windows: list[list[int]],
    reference: Callable[[str], Any],
) -> None:
    expected = token_logprobs(reference(served.quantisation), windows)
    found = correlation(scores(client, windows), expected)
    print(f"correlation {found:.5f} over {len(expected)} tokens")
    assert found >= MIN_CORRELATION


def test_greedy_text(
    client: CompletionClient,
    served: Served,
    windows: list[list[int]],
    reference: Callable[[str], Any],
) -> None:
    """Chosen tokens are the reference's best, or near ties; in bf16 a rare one is farther off,

    where rounding swaps an expert that the router finds as good as another.
    """
    stream = [token_id for window in windows for token_id in window]
    losses = []
    for _ in range(4):
        first = random.randrange(len(stream) - 300)
        prompt = stream[first : first + random.randint(4, 280)]
        answer = client.complete(prompt, 24, ignore_eos=True)
        loss = loss_against_best(reference(served.quantisation), prompt, answer.token_ids)
        assert len(loss) == 24
        assert loss.median() == 0
        losses += loss.tolist()
    assert sum(loss > served.max_loss for loss in losses) <= MAX_FARTHER, losses


def test_reloaded_weights_are_used(
    client: CompletionClient,
    server: VllmServer,
    served: Served,
    windows: list[list[int]],
    quantised_model: MakeModel,
    reference: Callable[[str], Any],
) -> None:
    """Another model's weights, and back again: the answers follow."""
    before = scores(client, windows)
    _reload(server, quantised_model(served.reloaded))
    other = scores(client, windows)
    expected = token_logprobs(reference(served.reloaded), windows)
    assert correlation(other, expected) >= MIN_CORRELATION
    if served.reloaded == served.quantisation:
        return
    assert _distance(other, expected) < _distance(before, expected) / 2
    _reload(server, quantised_model(served.quantisation))
    # How requests share steps decides roundings, so the answers need not be equal.
    assert _distance(scores(client, windows), before) < _distance(other, before) / 2


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().mean())


def _reload(server: VllmServer, directory: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    request = urllib.request.Request(
        f"{server.base_url}/collective_rpc",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        assert answer.status == 200


def test_the_reference_notices_a_forgotten_clamp(reference: Callable[[str], Any]) -> None:
    """Of the routed experts alone, as vLLM's own CPU path forgets it; and other faults."""
    windows = [[0, *torch.randint(3, 2048, (1023,)).tolist()]]
    expected = token_logprobs(reference("v4"), windows)
    for fault in (_no_routed_clamp, _no_shared_clamp, _other_hash_table, _no_routed_output):
        model = copy.deepcopy(reference("v4"))
        fault(model)
        found = correlation(token_logprobs(model, windows), expected)
        print(f"{fault.__name__}: {found:.4f}")
        assert found < MIN_CORRELATION


def _no_routed_clamp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.limit = 1e4


def _no_shared_clamp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.shared_experts.limit = 1e4


def _other_hash_table(model: Any) -> None:
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(table.roll(1, 0))


def _no_routed_output(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.data.zero_()
