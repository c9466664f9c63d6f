"""The small DeepSeek-V4's config.json: every kind of layer that the published models have."""

from typing import Any

from .quantised_v3 import quantization_config

# vLLM's CPU router takes 64, 128, 256 or 384 experts, and 6 or 8 of them per token.
NUM_EXPERTS, TOP_K = 64, 6
NUM_HASH_LAYERS = 1
# Sliding window alone, then learned and dense choice of compressed keys.
COMPRESS_RATIOS = (0, 4, 128)
NUM_HEADS, HEAD_DIM = 4, 512
RANK, GROUPS = 128, 2
INDEX_HEADS, INDEX_DIM = 64, 128
STREAMS = 4
# Low enough that almost every activation is clamped: who forgets it gets another text.
_SWIGLU_LIMIT = 0.05


def v4_config(v3: dict[str, Any]) -> dict[str, Any]:
    """config.json, with the sizes that the trained model and this one share from `v3`."""
    kept = "vocab_size hidden_size hidden_act rms_norm_eps initializer_range tie_word_embeddings "
    kept += "bos_token_id eos_token_id pad_token_id use_cache max_position_embeddings rope_theta"
    return {
        **{key: v3[key] for key in kept.split()},
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": quantization_config(scale_fmt="ue8m0"),
        "num_hidden_layers": len(COMPRESS_RATIOS),
        "moe_intermediate_size": 2 * v3["moe_intermediate_size"],
        "swiglu_limit": _SWIGLU_LIMIT,
        **_router_config(),
        **_attention_config(),
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "num_nextn_predict_layers": 0,
    }


def _router_config() -> dict[str, Any]:
    return {
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "num_hash_layers": NUM_HASH_LAYERS,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    }


def _attention_config() -> dict[str, Any]:
    return {
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": 64,
        "q_lora_rank": RANK,
        "o_lora_rank": RANK,
        "o_groups": GROUPS,
        "compress_ratios": list(COMPRESS_RATIOS),
        "compress_rope_theta": 160000.0,
        "sliding_window": 128,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 512,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
