"""A stand-in of vllm-neuron, in neuron_packages/, and what its experts should compute."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from oracle import Cast, Fixture
from torch import Tensor

PACKAGES = Path(__file__).parent / "neuron_packages"


def make_module() -> ModuleType:
    """Its module of routed experts with a fresh class, since swapping changes it."""
    path = PACKAGES / "vllm_neuron" / "model" / "deepseek_v4" / "moe.py"
    spec = importlib.util.spec_from_file_location("vllm_neuron.model.deepseek_v4.moe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exact_weights(experts: Any) -> tuple[Tensor, Tensor]:
    """fp64 gate above up, and down, of the local experts."""
    w1, w2, w3 = (
        (
            getattr(experts, f"{name}_weight").double() * getattr(experts, f"{name}_scale")[:, None]
        ).transpose(1, 2)
        for name in ("w1", "w2", "w3")
    )
    return torch.cat([w1, w3], dim=1), w2


def affinities_of(fixture: Fixture, num_experts: int) -> Tensor:
    dense = torch.zeros(len(fixture.topk_ids), num_experts)
    return dense.scatter_(1, fixture.topk_ids.long(), fixture.topk_weights)


def exact_shared(slices: list[Any], rows: Tensor, limit: float, cast: Cast) -> Tensor:
    """fp64 output of the shared expert that these slices make up."""

    def numbers(part: Any, name: str) -> Tensor:
        scale = getattr(part, f"{name}_scale").double()
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return getattr(part, f"{name}_weight").double() * spread

    gates, ups = ([numbers(part, name) for part in slices] for name in ("w1", "w3"))
    w13 = torch.cat([*gates, *ups])[None]
    w2 = torch.cat([numbers(part, "w2") for part in slices], dim=1)[None]
    ids, weights = torch.zeros(len(rows), 1, dtype=torch.int32), torch.ones(len(rows), 1)
    return Fixture(rows, ids, weights, w13, w2).routed(limit, cast)
