"""Fixtures for tests against the real vLLM: plugin installed, tiny config-only models."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_moe_ep import register

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

MakeConfig = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _plugin() -> None:
    register()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """vLLM's groups of ranks, with this process as the only one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{get_open_port()}"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """Build a real `VllmConfig` the way the engine does; no weights, no tokenizer."""

    def make(model: dict[str, Any] = DEEPSEEK_V3, **engine_args: Any) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        (tmp_path / "config.json").write_text(json.dumps(model))
        arguments = {"max_model_len": 128, "enforce_eager": True, **engine_args}
        args = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, load_format="dummy", **arguments
        )
        return args.create_engine_config()

    return make
