"""`vllm-moe-ep bench` on CPU, and what of it needs no device."""

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import rel_l2, routed_experts
from torch import Tensor

from vllm_moe_ep.bench import cli as bench_cli
from vllm_moe_ep.bench.answer import expected
from vllm_moe_ep.bench.clock import cpu_workspace
from vllm_moe_ep.bench.inputs import ROUTINGS, random_tokens, random_weights
from vllm_moe_ep.bench.measure import Bench, Peak, floor_us, measure
from vllm_moe_ep.bench.plot import check_plotting, curves
from vllm_moe_ep.bench.shape import LayerShape
from vllm_moe_ep.bench.table import as_json, header, lines
from vllm_moe_ep.bench.way import Result, Row, Ways
from vllm_moe_ep.cli.main import main
from vllm_moe_ep.errors import SettingsError, UnsupportedError
from vllm_moe_ep.stages import RoutedTokens

CPU = torch.device("cpu")
SHAPE = LayerShape(num_experts=6, top_k=2, hidden_size=256, width=128)
BENCH = Bench(SHAPE, "fp32", "uniform", 1, CPU, None)
SMALL = ["--num-experts", "6", "--top-k", "2", "--hidden-size", "256"]
SMALL += ["--intermediate-size", "128", "--repeats", "1"]


def in_fp64(weight: Any) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.double()
    return torch.stack(
        [
            v.double() * torch.kron(s, torch.ones(128, 128))
            for v, s in zip(weight.values, weight.scale, strict=True)
        ]
    )


@pytest.mark.parametrize("form", ["fp8", "bf16", "fp32"])
def test_the_answer_equals_the_oracle(form: str) -> None:
    weights = random_weights(SHAPE, form, CPU)
    tokens = random_tokens(SHAPE, 11, "uniform", torch.float32, CPU)
    answer = routed_experts(
        tokens.hidden_states,
        tokens.topk_ids,
        tokens.topk_weights,
        in_fp64(weights.w13),
        in_fp64(weights.w2),
    )
    assert rel_l2(expected(weights, tokens), answer) <= 1e-5
    assert 0.1 < answer.norm() / tokens.hidden_states.norm() < 10


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing(routing: str) -> None:
    tokens = random_tokens(SHAPE, 600, routing, torch.float32, CPU)
    assert all(len(set(row)) == SHAPE.top_k for row in tokens.topk_ids.tolist())
    torch.testing.assert_close(tokens.topk_weights.sum(dim=1), torch.ones(600))
    counts = torch.bincount(tokens.topk_ids.flatten(), minlength=6)
    if routing == "uniform":
        assert counts.min() > 100
    elif routing == "skewed":
        assert counts[0] > 2 * counts[5]
    else:
        assert counts.tolist() == [600, 600, 0, 0, 0, 0]


def ways_of(**by_name: Callable[[RoutedTokens], Tensor]) -> Ways:
    stock = tuple(name for name in by_name if name != "ours")
    return Ways(by_name, stock, {}, lambda num_tokens: f"way_{num_tokens}")


def test_wrong_and_failing_ways_are_reported() -> None:
    weights = random_weights(SHAPE, "fp32", CPU)

    def broken(tokens: RoutedTokens) -> Tensor:
        raise OSError("no such kernel")

    ways = ways_of(
        ours=lambda tokens: expected(weights, tokens),
        doubled=lambda tokens: 2 * expected(weights, tokens),
        nan=lambda tokens: expected(weights, tokens) * math.nan,
        broken=broken,
    )
    row = measure(BENCH, ways, weights, 5)
    assert row.results["ours"].failure is None and row.results["ours"].us is not None
    assert row.results["doubled"].error == pytest.approx(1)
    assert "exceeds 1e-05" in str(row.results["doubled"].failure)
    assert "nan exceeds" in str(row.results["nan"].failure)
    assert "no such kernel" in str(row.results["broken"].failure)
    assert row.chosen == "way_5" and row.floor_us is None
    assert row.flops == 5 * 2 * 6 * 256 * 128


def test_the_engine_s_memory_is_given_back_before_it_is_counted() -> None:
    weights = random_weights(SHAPE, "fp32", CPU)
    held: list[Tensor] = []

    def stock(tokens: RoutedTokens) -> Tensor:
        if not held:
            held.append(torch.empty(1 << 24, dtype=torch.uint8))
        return expected(weights, tokens)

    ways = ways_of(ours=lambda tokens: expected(weights, tokens), stock=stock)
    kept = measure(BENCH, ways, weights, 5).results["stock"].workspace_bytes
    counted = measure(BENCH, replace(ways, release=held.clear), weights, 5).results["stock"]
    assert kept is not None and kept < 1 << 24 <= int(counted.workspace_bytes or 0)


def test_floor_is_the_larger_of_reading_and_multiplying() -> None:
    bench = Bench(SHAPE, "fp8", "uniform", 1, CPU, Peak(1e12, {"fp8": 1e15}))
    assert floor_us(bench, 3_000_000, 1_000_000) == pytest.approx(3)
    assert floor_us(bench, 1, 5_000_000_000) == pytest.approx(5)


def test_workspace_counts_what_lives_at_one_time() -> None:
    rows = torch.zeros(256, 4)

    def call() -> Tensor:
        first = rows + 1
        first = first.view(-1)[:512] * 2
        return first + 1

    # 4096 bytes with their half, while the first are kept by a view: then the halves only.
    assert cpu_workspace(call) == 4096 + 2048
    assert cpu_workspace(lambda: rows.view(-1)) == 0


def row_of(**times: float) -> Row:
    results = {
        name: Result(us=us, error=0.0, workspace_bytes=3 << 20) for name, us in times.items()
    }
    return Row("fp8", 8, "engine", 43_000_000, 2_000_000_000, 9.0, results)


def test_table_and_json() -> None:
    ways = ways_of(ours=lambda t: t.hidden_states, auto=lambda t: t.hidden_states)
    row = row_of(ours=10.0, auto=15.0, other=8.0)
    assert row.ratio(("auto", "other")) == 0.8 and row.ratio(("auto",)) == 1.5
    (line,) = lines(row_of(ours=10.0, auto=15.0), ways)
    assert len(header(ways).split()) == len(line.split())
    cells = dict(zip(header(ways).split(), line.split(), strict=True))
    assert cells["ours"] == "10.0" and cells["vs_auto"] == "1.500" and cells["MiB"] == "3.0"
    assert cells["auto_MiB"] == "3.0"
    assert cells["TB/s"] == "4.30" and cells["TFLOP/s"] == "200.00"
    found = as_json(row, ways)
    assert json.loads(json.dumps(found))["ways"]["other"]["us"] == 8.0
    assert found["tb_per_s"] == pytest.approx(4.3)


def test_curves_leave_failures_out() -> None:
    rows = [row_of(ours=10.0, bad=1.0)]
    rows[0].results["bad"] = Result(us=1.0, failure="wrong")  # type: ignore[index]
    assert curves(rows, "fp8") == {"ours": [(8, 10.0)], "floor": [(8, 9.0)]}
    assert curves(rows, "bf16") == {}


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        check_plotting(tmp_path / "curves.svg")


@pytest.mark.parametrize("place", ["", "missing/curves.svg"])
def test_plot_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    with pytest.raises(SettingsError, match="a new file in a folder that exists"):
        check_plotting(tmp_path / place)


def test_cpu_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "--platform", "cpu", "--tokens", "1,20", "--ways", "--json", *SMALL]
    assert main(command) == 0
    head, *rows = [json.loads(x) for x in capfd.readouterr().out.splitlines() if x[:1] == "{"]
    assert head["shape"]["num_experts"] == 6
    rows = [row for row in rows if "ways" in row]
    assert [(row["format"], row["tokens"]) for row in rows] == [
        (form, size) for form in ("bf16", "fp32") for size in (1, 20)
    ]
    for row in rows:
        assert list(row["ways"]) == ["ours", "ragged", "grouped", "dense"]
        assert all(way["failure"] is None for way in row["ways"].values())
        assert row["ways"]["dense"]["workspace_bytes"] >= row["tokens"] * 256 * 4
        limit = 4 * (row["tokens"] * (2 * 128 + 2 * 256) + 2 * 128 * 256)
        assert all(way["workspace_bytes"] <= limit for way in row["ways"].values())


def test_shape_from_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_routed_experts": 12, "num_experts_per_tok": 3, "hidden_size": 64}
    sizes |= {"moe_intermediate_size": 32, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    seen: list[Any] = []
    monkeypatch.setattr(bench_cli, "_measure_format", lambda o, form: seen.append(o) or [])
    command = ["bench", "--platform", "cpu", "--model", str(tmp_path), "--ep-size"]
    assert main([*command, "4", "--top-k", "2"]) == 0
    assert seen[0].shape == LayerShape(3, 2, 64, 32)
    assert main([*command, "5"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--platform cpu"),
        (["--platform", "cpu", "--formats", "fp8"], "use bf16, fp32"),
        (["--platform", "cpu", "--tokens", "1,x"], "found 1,x"),
        (["--platform", "cpu", "--top-k", "33"], "lower"),
        (["--platform", "cpu", "--ep-size", "2"], "--num-experts"),
        (["--platform", "cpu", "--repeats", "0"], "at least 1"),
    ],
)
def test_refusals(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(bench_cli.torch, "cuda", no_cuda)
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err
