"""A stand-in of vllm-neuron, in neuron_packages/, and what its experts should compute."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from oracle import Fixture
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
