"""The part of the runner that builds, loads and compiles a model."""

from typing import Any

import torch


class NeuronModelRunner:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def load_model(self) -> None:
        from vllm_neuron.model.deepseek_v4.model import DeepseekV4ForCausalLM

        with torch.device("meta"):
            self.model: Any = DeepseekV4ForCausalLM.from_configs(
                self.vllm_config.model_config.hf_config, None
            )
        self.model.load_weights("checkpoint", torch.device("cpu"), None)
        self.model = torch.compile(self.model.to("cpu"), backend="eager", fullgraph=True)
