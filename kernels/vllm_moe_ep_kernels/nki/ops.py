"""The kernels as torch ops, each one node of a traced graph."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_moe_ep_kernels.nki import block_linear as linear_kernels
from vllm_moe_ep_kernels.nki import experts as expert_kernels
from vllm_moe_ep_kernels.nki import swiglu as swiglu_kernel
from vllm_moe_ep_kernels.nki.launch import launch


def _op(fake: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Any]:
    """Register a function as an op; torch-neuronx's own way where it is installed."""

    def register(function: Callable[..., Tensor]) -> Any:
        name = f"vllm_moe_ep_kernels::{function.__name__}"
        if importlib.util.find_spec("torch_neuronx") is not None:
            neuron = importlib.import_module("torch_neuronx")
            if hasattr(neuron, "nki_op"):
                return neuron.nki_op(name, mutates_args={})(function)
        op = torch.library.custom_op(name, function, mutates_args=())
        op.register_fake(fake)
        return op

    return register


def _like_linear(rows: Tensor, *_: object, n: int = 0) -> Tensor:
    return rows.new_empty((rows.shape[0], n), dtype=torch.float32)


@_op(lambda rows, codes, scales, flag, expert, n, *_: _like_linear(rows, n=n))
def nki_block_linear(
    rows: Tensor,
    codes: Tensor,
    scales: Tensor,
    flag: Tensor | None,
    expert: int,
    n: int,
    is_fp4: bool,
    is_interleaved: bool,
    num_cores: int,
) -> Tensor:
    """fp32 [rows, n]; more rows than fit are taken in turns.

    See the kernels ``block_linear`` and, where there is a flag, ``gated_block_linear``.
    """
    arguments = {
        "codes": codes,
        "scales": scales,
        "expert": expert,
        "is_fp4": is_fp4,
        "is_interleaved": is_interleaved,
    }
    kernel: Callable[..., Any] = linear_kernels.block_linear
    if flag is not None:
        kernel, arguments["flag"] = linear_kernels.gated_block_linear, flag
    parts = [
        launch(kernel, num_cores, {"x": part, **arguments})
        for part in rows.split(linear_kernels.MAX_ROWS)
        if part.shape[0]
    ]
    return torch.cat(parts) if parts else _like_linear(rows, n=n)


@_op(lambda gate_up, *_: _like_linear(gate_up, n=gate_up.shape[1] // 2))
def nki_swiglu(gate_up: Tensor, row_weight: Tensor, limit: float, num_cores: int) -> Tensor:
    """fp32 [rows, width]; see the kernel ``swiglu``."""
    if gate_up.shape[0] == 0:
        return _like_linear(gate_up, n=gate_up.shape[1] // 2)
    arguments = {
        "gate_up": gate_up.to(torch.float32),
        "row_weight": row_weight[:, None].contiguous(),
        "swiglu_limit": limit,
    }
    return launch(swiglu_kernel.swiglu, num_cores, arguments)


def _like_rows(rows: Tensor, *_: object) -> Tensor:
    return torch.empty_like(rows, dtype=torch.float32)


@_op(_like_rows)
def nki_experts(
    rows: Tensor,
    w13_codes: Tensor,
    w13_scales: Tensor,
    w2_codes: Tensor,
    w2_scales: Tensor,
    row_weight: Tensor,
    flags: Tensor,
    is_fp4: bool,
    limit: float,
    num_cores: int,
    is_list: bool = False,
) -> Tensor:
    """fp32 of the rows' shape: the cores' partial sums added.

    Rows [rows, hidden_size] go to the kernel ``gated_experts``, or to ``listed_experts`` if
    ``is_list``, and more than fit are taken in turns. Rows [experts, rows, hidden_size] go to
    ``grouped_experts``.

    Raises:
        ValueError: a list of experts with rows of their own.
    """
    if is_list and rows.dim() == 3:
        raise ValueError(
            "Experts with rows of their own take flags, not a list: leave out is_list."
        )
    arguments = {
        "w13_codes": w13_codes,
        "w13_scales": w13_scales,
        "w2_codes": w2_codes,
        "w2_scales": w2_scales,
        "is_fp4": is_fp4,
        "swiglu_limit": limit,
    }
    if is_list:
        arguments["expert_ids"], arguments["count"] = hit_list(flags)
    else:
        arguments["flags"] = flags
    kernel: Callable[..., Any] = expert_kernels.grouped_experts
    if rows.dim() == 2:
        kernel = expert_kernels.listed_experts if is_list else expert_kernels.gated_experts
    sums = []
    for start in range(0, rows.shape[-2], expert_kernels.MAX_ROWS):
        stop = start + expert_kernels.MAX_ROWS
        x, weight = rows[..., start:stop, :].contiguous(), row_weight[:, start:stop].contiguous()
        call = {"x": x, "row_weight": weight, **arguments}
        sums.append(launch(kernel, num_cores, call).sum(dim=0))
    return torch.cat(sums, dim=-2) if sums else _like_rows(rows)


def hit_list(flags: Tensor) -> tuple[Tensor, Tensor]:
    """int32 flags [1, experts] -> ids [1, experts], those that are hit first, and how many are.

    All shapes are static; as ``listed_experts`` takes them.
    """
    hit = flags != 0
    ids = torch.argsort(hit.to(torch.int32), dim=1, descending=True, stable=True)
    return ids.to(torch.int32), hit.sum(dim=1, keepdim=True).to(torch.int32)
