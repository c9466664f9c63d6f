"""The small model's config.json: DeepSeek-V3 in every feature, about 6 M parameters."""

from typing import Any

VOCAB_SIZE = 2048
BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 1
PAD_TOKEN_ID = 2


def model_config(weight_dtype: str) -> dict[str, Any]:
    """The contents of config.json.

    Sizes that others depend on: kv_lora_rank 512 with qk_rope_head_dim 64 is the only latent
    that vLLM's CPU attention kernel takes; hidden_size and moe_intermediate_size are multiples
    of 128, so the weights can be quantised in 128 x 128 blocks.
    """
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "use_cache": True,
        # A reader without the second key takes the first for the type of the weights.
        "torch_dtype": weight_dtype,
        "dtype": weight_dtype,
        **_attention_config(),
        **_moe_config(),
    }


def _attention_config() -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 2048,
        "rope_interleave": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def _moe_config() -> dict[str, Any]:
    return {
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        # vLLM looks for these two; Hugging Face's config class knows neither.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
    }
