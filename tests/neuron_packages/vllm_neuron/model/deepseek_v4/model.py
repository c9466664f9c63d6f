"""A model of two layers, built and loaded as the runner asks for it."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm_neuron.model.deepseek_v4.moe import (
    DeepseekV4MoE,
    DeepseekV4RoutedExperts,
    DeepseekV4SharedExpert,
)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        ep_degree = config.n_routed_experts // 4
        experts = DeepseekV4RoutedExperts(config, layer_idx, ep_degree=ep_degree)
        self.ffn = DeepseekV4MoE(experts, DeepseekV4SharedExpert(config, 1))


class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(2))

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> "DeepseekV4ForCausalLM":
        return cls(hf_config)

    def load_weights(self, checkpoint_path: str, device: torch.device, cache_dir: Any) -> None:
        for layer in self.layers:
            layer.ffn.experts.set_random_weights()
            layer.ffn.shared_expert.set_random_weights()

    def forward(self, hidden_states: Tensor, affinities: Tensor, ids: Tensor) -> Tensor:
        outputs = [layer.ffn(hidden_states, affinities, False) for layer in self.layers]
        return torch.stack(outputs)
