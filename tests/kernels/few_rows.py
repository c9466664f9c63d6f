"""Inputs and fp64 answers of the few-row kernels; imports nothing of them but their interface."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import quant_oracle
import torch
from torch import Tensor

from tests.kernels.row_kernels import RowKernels, row_kernels
from vllm_moe_ep_kernels.product_tiles import ProductTiles
from vllm_moe_ep_kernels.reference.few_rows_routing import PairRouting

ACTIVATION = quant_oracle.Blocks(1, 128, 448.0, False, False)
WAYS = [("fp8", False), ("fp8", True), ("bf16", False)]
"""Weight format, and whether rows are cast before."""
LIMITS = {"fp8": 0.03, "bf16": 1e-2}
"""Of a row's relative L2 error: a rounding of one number to fp8 may fall the other way."""


@dataclass(frozen=True)
class Case:
    """One projection's inputs on CPU.

    Attributes:
        rows: bf16.
        weight: [num_experts, n, k] bf16 or fp8.
        weight_scale: fp32, or None.
        numbers: fp64 [num_experts, n, k].
    """

    rows: Tensor
    weight: Tensor
    weight_scale: Tensor | None
    numbers: Tensor
    routing: PairRouting

    @property
    def is_fp8(self) -> bool:
        return self.weight_scale is not None

    @property
    def limit(self) -> float:
        return LIMITS["fp8" if self.is_fp8 else "bf16"]

    def seen_rows(self) -> Tensor:
        """fp64: what the product sees of the rows."""
        rows = self.rows.double()
        return quant_oracle.quantise_dequantise(rows, ACTIVATION) if self.is_fp8 else rows

    def local(self) -> list[int]:
        """Each pair's expert or -1, by Python's integers."""
        routing = self.routing
        table = None if routing.expert_map is None else routing.expert_map.tolist()
        known = range(routing.num_local_experts if table is None else len(table))
        ids = routing.topk_ids.flatten().tolist()
        return [-1 if i not in known else (i if table is None else table[i]) for i in ids]

    def on(self, device: str) -> "Case":
        def move(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.to(device)

        routing = replace(
            self.routing,
            topk_ids=move(self.routing.topk_ids),
            expert_map=move(self.routing.expert_map),
        )
        return Case(
            move(self.rows), move(self.weight), move(self.weight_scale), self.numbers, routing
        )


def make_case(
    form: str, num_rows: int, n: int, k: int, routing: PairRouting, rows: Tensor | None = None
) -> Case:
    """Random rows, weights of about 1 / sqrt(k)."""
    if rows is None:
        rows = torch.randn(num_rows, k).bfloat16()
    num_experts = routing.num_local_experts
    if form == "bf16":
        weight = (torch.randn(num_experts, n, k) / k**0.5).bfloat16()
        return Case(rows, weight, None, weight.double(), routing)
    weight = (torch.randn(num_experts, n, k) * 16).to(torch.float8_e4m3fn)
    scale = (torch.rand(num_experts, n // 128, k // 128) + 0.5) / (16 * k**0.5)
    numbers = quant_oracle.dequantise(weight, scale, 128, 128)
    return Case(rows, weight, scale, numbers, routing)


def random_routing(num_tokens: int, top_k: int, num_experts: int, has_map: bool) -> PairRouting:
    """Ids of all kinds: repeated, unknown and, with a map, of other ranks."""
    num_ids = 2 * num_experts if has_map else num_experts
    ids = torch.randint(-1, num_ids + 1, (num_tokens, top_k), dtype=torch.int32)
    expert_map = None
    if has_map:
        local = torch.randperm(num_ids)
        expert_map = torch.where(local < num_experts, local, -1).to(torch.int32)
    return PairRouting(ids, expert_map, num_experts)


def few_row_kernels(implementation: str) -> RowKernels:
    """The implementation; interpreted kernels get the hardware's rounding."""
    kernels = row_kernels(implementation)
    if kernels.is_interpreted:
        importlib.import_module("tests.kernels.exact_interpreter").install()
    return kernels


def tiles_of(kernels: RowKernels, **numbers: Any) -> dict[str, Any]:
    """The keyword of a Triton launcher; its reference takes none."""
    if kernels.package == "reference":
        return {}
    return {"tiles": ProductTiles(**numbers)}


def planned(kernels: RowKernels, routing: PairRouting, block_rows: int) -> PairRouting:
    """The routing with tiles by the same implementation."""
    plan: Callable[..., Any] = kernels.get("few_rows_plan")
    return replace(routing, tiles=plan(routing, block_rows, None)[0])


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative L2 error of each row, fp64."""
    difference = (actual.cpu().double() - expected).norm(dim=1)
    return difference / expected.norm(dim=1).clamp(min=1e-30)


def cast_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 and scales by the oracle's numbers, for kernels that take them so."""
    groups = rows.double().view(rows.shape[0], -1, 128)
    scale = (groups.abs().amax(2) / 448).float().clamp(min=2.0**-126)
    numbers = (groups / scale.double()[..., None]).float().clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).flatten(1), scale
