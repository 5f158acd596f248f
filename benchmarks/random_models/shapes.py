"""Shapes of real models, as transformers configures them."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "vocab_size": 102400,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    # For rehearsals on a CPU.
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-70b": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "llama-2-70b": {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 28672, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "qwen3.5-9b": {"model_type": "qwen3_5_text", "tie_word_embeddings": False},
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 12288, "vocab_size": 65536,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "tie_word_embeddings": False,
    },
    # In transformers' default sizes, as Qwen3.5's.
    "bamba-9b": {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "tie_word_embeddings": False},
    "gemma4": {"model_type": "gemma4_text", "num_kv_shared_layers": 6},
    "deepseek-v2-lite": _V2_LITE | {"first_k_dense_replace": 1},
    # Every row of a tree chooses its own experts, which costs more than all else; without experts attention shows.
    "deepseek-v2-lite-dense": _V2_LITE | {"first_k_dense_replace": 27},
}  # fmt: skip


def config_of(shape: str, layers: int | None = None) -> PretrainedConfig:
    """A named shape as transformers reads it, with so many layers, or all."""
    sizes = {"model_type": "llama"} | SHAPES[shape]
    sizes |= {} if layers is None else {"num_hidden_layers": layers}
    return AutoConfig.for_model(**sizes, max_position_embeddings=8192)
