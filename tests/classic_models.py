"""Tiny models with random weights of families by the plan of GPT."""

from __future__ import annotations

from typing import Any

PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
NEW_FALCON: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": True}
# By a name for the test: `model_type`, and settings beside the usual ones of `conftest.TINY`.
CLASSIC: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-gpt": ("openai-gpt", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 72}),
    "gpt2, tied": ("gpt2", {"tie_word_embeddings": True, "scale_attn_weights": False}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, many key heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    ),
    "gpt_neox": ("gpt_neox", {"rope_parameters": PARTIAL}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "falcon": ("falcon", {"multi_query": True, "parallel_attn": True}),
    "falcon, groups": ("falcon", NEW_FALCON | {"bias": True}),
    "falcon, groups and one norm": ("falcon", NEW_FALCON | {"num_ln_in_parallel_attn": 1, "tie_word_embeddings": True}),
    "falcon, one after the other": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "falcon, falling": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    "falcon, falling, twelve heads": (
        "falcon", {"num_attention_heads": 12, "multi_query": False, "parallel_attn": False, "alibi": True},
    ),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "bloom, twelve heads": (
        "bloom", {"num_attention_heads": 12, "n_layer": 2, "n_head": 12, "tie_word_embeddings": True},
    ),
    "mpt": ("mpt", {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "mpt, twelve heads": (
        "mpt",
        {
            "d_model": 48, "n_heads": 12, "n_layers": 2, "max_seq_len": 512, "num_attention_heads": 12,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 512,
            "attn_config": {"clip_qkv": 0.5, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "persimmon": ("persimmon", {"rope_parameters": PARTIAL}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "opt, no biases": (
        "opt",
        {"ffn_dim": 96, "word_embed_proj_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "xglm": (
        "xglm",
        {"d_model": 48, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4, "tie_word_embeddings": True},
    ),
    "biogpt": ("biogpt", {"tie_word_embeddings": True}),
}  # fmt: skip
