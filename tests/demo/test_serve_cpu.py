"""The benchmark's arithmetic, against the fake server."""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_moe_ep.demo.client import Completion
from vllm_moe_ep.demo.server import VllmServer

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "serve_cpu.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_cpu", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TimedClient:
    """Takes 2 s for a prompt and 0.01 s for each token, on a clock of its own."""

    def __init__(self) -> None:
        self.now_seconds = 0.0

    def complete(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Completion:
        self.now_seconds += 2 + 0.01 * max_tokens
        return Completion("", (1,) * max_tokens, (), "length")


def test_decode_rate_leaves_the_prompt_out(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = TimedClient()
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: client.now_seconds)
    rate = benchmark.decode_rate(client, benchmark.RandomPrompts(2048, 0))
    assert rate == pytest.approx(100)


def test_missing_tokens_are_an_error(benchmark: ModuleType) -> None:
    class ShortClient(TimedClient):
        def complete(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Completion:
            return super().complete(prompt, max_tokens - 1, ignore_eos)

    with pytest.raises(RuntimeError, match="got 0"):
        benchmark.completion_seconds(ShortClient(), [1], 1)


def test_prompts_are_never_repeated(benchmark: ModuleType) -> None:
    prompts = benchmark.RandomPrompts(2048, 0)
    drawn = [tuple(prompts.draw(32)) for _ in range(50)]
    assert len(set(drawn)) == len(drawn)
    assert all(3 <= token_id < 2048 for prompt in drawn for token_id in prompt)


def test_text_prompts_are_pieces_of_the_text(benchmark: ModuleType) -> None:
    text = list(range(3000))
    prompts = benchmark.TextPrompts(text)
    starts = [prompts.draw(32)[0] for _ in range(80)]
    assert len(set(starts)) == len(starts)
    piece = prompts.draw(512)
    assert piece == text[piece[0] : piece[0] + 512]
    with pytest.raises(ValueError, match="--random-prompts"):
        benchmark.TextPrompts(text[:512])


def test_a_measurement_of_a_paused_server(
    benchmark: ModuleType, make_server: Callable[..., VllmServer]
) -> None:
    with make_server() as server:
        server.pause()
        figures = benchmark.measure_paused(server, benchmark.RandomPrompts(2048, 0))
        assert figures.of_32_tokens_per_s > 0
        assert figures.first_token_1024_ms > 0
        assert server._process is not None
        wait_until_stopped(server._process.pid)


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, f"process {pid} runs on"
        time.sleep(0.05)


def test_ratios_are_taken_within_a_round(benchmark: ModuleType) -> None:
    results = {
        benchmark.STOCK: [benchmark.Figures(x, x, x, x, x) for x in (100.0, 10.0, 40.0)],
        "static-ep": [benchmark.Figures(x, 2 * x, x / 2, x, x) for x in (100.0, 20.0, 40.0)],
    }
    assert benchmark.ratios_to_stock(results)["static-ep"] == benchmark.Figures(
        1.0, 2.0, 0.5, 1.0, 1.0
    )
    last = benchmark.table(results).splitlines()[-1]
    assert last.split()[1:7] == ["40.0", "(1.000)", "80.0", "(2.000)", "20.0", "(0.500)"]


def test_medians_are_per_figure(benchmark: ModuleType) -> None:
    rows = [
        benchmark.Figures(*values) for values in ((1, 9, 5, 0, 1), (3, 7, 4, 0, 2), (2, 8, 6, 0, 9))
    ]
    assert benchmark.medians(rows) == benchmark.Figures(2, 8, 5, 0, 2)
