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


class DeepseekV4SharedExpert(nn.Module):
    """A slice of the shared expert; its own computation gives 3 everywhere."""

    def __init__(self, config: Any, shared_group_size: int) -> None:
        super().__init__()
        self.shared_group_size = shared_group_size
        self.swiglu_limit = float(config.swiglu_limit)
        width = config.moe_intermediate_size // shared_group_size
        self.sizes = {"w1": (width, config.hidden_size), "w3": (width, config.hidden_size)}
        self.sizes["w2"] = (config.hidden_size, width)
        self.set_random_weights()

    def set_random_weights(self) -> None:
        for name, (n, k) in self.sizes.items():
            codes = torch.randint(0, 0x78, (n, k), dtype=torch.uint8)
            scale = torch.exp2(torch.randint(-13, -9, (-(-n // 128), -(-k // 128))).float())
            for part, tensor in (("weight", codes.view(torch.float8_e4m3fn)), ("scale", scale)):
                setattr(self, f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.full_like(hidden_states, 3.0)


class DeepseekV4MoE(nn.Module):
    """Router, routed experts and shared expert; affinities travel as the ids."""

    def __init__(self, experts: DeepseekV4RoutedExperts, shared: DeepseekV4SharedExpert) -> None:
        super().__init__()
        self.experts, self.shared_expert = experts, shared

    def _route(self, hidden_states: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return input_ids, torch.zeros(len(input_ids), 1, dtype=torch.int32)

    def forward(self, hidden_states: Tensor, input_ids: Tensor, is_prefill: bool) -> Tensor:
        routed = self.experts(hidden_states, *self._route(hidden_states, input_ids), is_prefill)
        return routed + self.shared_expert(hidden_states)
