"""Routed experts as vllm-neuron keeps them; their own computation gives 7 everywhere."""

from typing import Any

import torch
from torch import Tensor, nn

STOCK_OUTPUT = 7.0


class DeepseekV4RoutedExperts(nn.Module):
    def __init__(
        self,
        config: Any,
        layer_idx: int,
        *,
        ep_degree: int = 2,
        ep_rank: int = 0,
        ep_group: Any = None,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.ep_degree, self.ep_group = ep_degree, ep_group
        self.num_local_experts = config.n_routed_experts // ep_degree
        self.swiglu_limit = float(config.swiglu_limit)
        rank = torch.tensor([[ep_rank]], dtype=torch.int32, device="cpu")
        self.register_buffer("ep_rank_buf", rank, persistent=False)
        hidden_size, width = config.hidden_size, config.moe_intermediate_size
        sizes = {"w1": (hidden_size, width), "w3": (hidden_size, width), "w2": (width, hidden_size)}
        for name, (k, n) in sizes.items():
            weight = torch.empty(self.num_local_experts, k, n, dtype=torch.float8_e4m3fn)
            scale = torch.empty(self.num_local_experts, n)
            setattr(self, f"{name}_weight", nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def set_random_weights(self) -> None:
        for name in ("w1", "w3", "w2"):
            shape = getattr(self, f"{name}_weight").shape
            codes = torch.randint(0, 256, shape, dtype=torch.uint8)
            codes[codes & 0x7F >= 0x78] = 0x38
            weight = codes.view(torch.float8_e4m3fn)
            scale = torch.exp2(torch.randint(-13, -9, (shape[0], shape[2])).float())
            setattr(self, f"{name}_weight", nn.Parameter(weight, requires_grad=False))
            setattr(self, f"{name}_scale", nn.Parameter(scale, requires_grad=False))

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        is_prefill: bool,
    ) -> Tensor:
        return torch.full_like(hidden_states, STOCK_OUTPUT)
