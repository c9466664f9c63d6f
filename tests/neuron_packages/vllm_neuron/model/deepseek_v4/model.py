"""A model of two layers, built and loaded as the runner asks for it."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm_neuron.model.deepseek_v4.moe import DeepseekV4RoutedExperts


class Layer(nn.Module):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        ep_degree = config.n_routed_experts // 4
        self.routed_experts = DeepseekV4RoutedExperts(config, layer_idx, ep_degree=ep_degree)


class DeepseekV4ForCausalLM(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index) for index in range(2))

    @classmethod
    def from_configs(cls, hf_config: Any, neuron_config: Any) -> "DeepseekV4ForCausalLM":
        return cls(hf_config)

    def load_weights(self, checkpoint_path: str, device: torch.device, cache_dir: Any) -> None:
        for layer in self.layers:
            layer.routed_experts.set_random_weights()

    def forward(self, hidden_states: Tensor, affinities: Tensor, ids: Tensor) -> Tensor:
        outputs = [
            layer.routed_experts(hidden_states, affinities, ids, False) for layer in self.layers
        ]
        return torch.stack(outputs)
