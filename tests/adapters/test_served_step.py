"""The step that serves, on vLLM's own groups of ranks: right, in as few collectives as it says."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import REL_L2_LIMIT, expert, rel_l2
from torch import Tensor

from tests.adapters.conftest import DEEPSEEK_V3
from tests.adapters.vllm_ranks import Job, Layout, RankResult, rows_of, run_all, weights_of

WIDE = {
    **DEEPSEEK_V3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
}
ONE, TP2, TP4 = Layout(), Layout(tp=2), Layout(tp=4)
DP2 = Layout(dp=2, counts=(9, 4))
DP2_TP2 = Layout(dp=2, tp=2, counts=(9, 4))
STATIC = ("static", "dense", "gated", "grouped")


def expected_output(job: Job) -> Tensor:
    """fp64 rows of all data-parallel ranks, by plain loops."""
    model, weights = job.model, {k: v.double() for k, v in weights_of(job.model).items()}
    dtype = getattr(torch, job.dtype)
    weights = {k: v if k == "bias" else v.to(dtype).double() for k, v in weights.items()}
    outputs = []
    for row in torch.cat(list(rows_of(job.layout, model["hidden_size"]))).to(dtype).double():
        scores = torch.sigmoid(weights["gate"] @ row)
        groups = (scores + weights["bias"]).view(model["n_group"], -1)
        best = groups.topk(2, dim=1).values.sum(1).topk(model["topk_group"]).indices
        allowed = torch.zeros_like(groups, dtype=torch.bool)
        allowed[best] = True
        top_k = model["num_experts_per_tok"]
        ids = groups.masked_fill(~allowed, -1e9).flatten().topk(top_k).indices
        routed = sum(
            scores[e] * expert(row, weights["w13"][e], weights["w2"][e]) for e in ids.tolist()
        )
        routed = routed * model["routed_scaling_factor"] / scores[ids].sum()
        gate, up = (weights["shared_w13"] @ row).chunk(2)
        outputs.append(routed + weights["shared_w2"] @ (F.silu(gate) * up))
    return torch.stack(outputs)


def check(job: Job, results: list[RankResult]) -> None:
    expected = expected_output(job).split(list(job.layout.counts))
    for rank, result in enumerate(results):
        wanted = expected[rank // job.layout.tp]
        error = rel_l2(result.output, wanted)
        assert error <= REL_L2_LIMIT[getattr(torch, job.dtype)], f"rank {rank}: {error}"


def collectives_of(job: Job) -> Counter[str]:
    counts: Counter[str] = Counter()
    if job.layout.dp > 1:
        counts.update(all_gather=1, reduce_scatter=1)
    if job.layout.tp > 1 and job.settings.get("device_size"):
        counts.update(all_reduce_within_devices=1, all_reduce_across_devices=1)
    elif job.layout.tp > 1:
        counts.update(all_reduce=1)
    if job.settings.get("experts") == "grouped" and job.layout.dp > 1:
        counts.update(all_reduce_max=1 + (job.layout.tp > 1))
    return counts


CASES: dict[str, tuple[Layout, list[dict[str, Any]]]] = {
    "one rank": (ONE, [{}, {"experts": "static"}]),
    "tp2": (
        TP2,
        [{}, {"shared_slices": False}]
        + [{"experts": experts, "expert_capacity": 8} for experts in STATIC],
    ),
    "tp4": (
        TP4,
        [
            {"device_size": 2},
            {"device_size": 2, "experts": "static", "shared_slices": False},
        ],
    ),
    "dp2": (DP2, [{}, {"experts": "static", "gather": "fp32"}]),
    "dp2 x tp2": (
        DP2_TP2,
        [
            {"shared_slices": False},
            {"experts": "static"},
            {"experts": "grouped", "expert_capacity": 20},
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle_in_few_collectives(name: str) -> None:
    layout, all_settings = CASES[name]
    jobs = [Job(layout, WIDE, settings) for settings in all_settings]
    for job, results in zip(jobs, run_all(jobs), strict=True):
        check(job, results)
        expected = collectives_of(job)
        assert all(result.counts == expected for result in results), job.settings
        # vLLM logs such a line on one rank.
        (counted,) = {line for result in results for line in result.log if "counted:" in line}
        names = ", ".join(f"{count} {entered}" for entered, count in sorted(expected.items()))
        assert counted.endswith(f"counted: {names or 'none'}")


@pytest.mark.parametrize("layout", [TP2, DP2], ids=["tp2", "dp2"])
def test_bfloat16(layout: Layout) -> None:
    """Partial sums stay in fp32 until the last cast."""
    job = Job(layout, WIDE, dtype="bfloat16")
    check(job, run_all([job])[0])
