"""Configs of tiny quantised models."""

from typing import Any

from tests.adapters.conftest import DEEPSEEK_V3

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

FP8_V3 = {
    **DEEPSEEK_V3,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "torch_dtype": "bfloat16",
    "quantization_config": QUANTIZATION,
}

V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "vocab_size": 128,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 0.05,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {**QUANTIZATION, "scale_fmt": "ue8m0"},
}
