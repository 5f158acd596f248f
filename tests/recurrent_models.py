"""Tiny models with random weights whose layers keep states in place of keys and values."""

from __future__ import annotations

from typing import Any

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONVOLVED: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "head_dim": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
TURNED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# Rows that transformers computes together, and fills up to: of its own 256, a token took it as long as a long prompt.
CHUNK = 16
MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_chunk_size": CHUNK,
}  # fmt: skip
HYBRID = MAMBA | {
    "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": None, "shared_intermediate_size": 64,
    "residual_multiplier": 0.5,
}  # fmt: skip

NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"], "head_dim": 16,
    "mamba_num_heads": 12, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
    "chunk_size": CHUNK,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5,
}  # fmt: skip

FALCON: dict[str, Any] = {
    "num_hidden_layers": 2, "head_dim": 12, "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8,
    "mamba_d_state": 8, "mamba_n_groups": 2, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0,
    "mamba_chunk_size": CHUNK,
    "mlp_multipliers": [0.7, 0.8], "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9, "ssm_multipliers": [0.5, 0.8, 1.3, 0.7, 1.1], "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
}  # fmt: skip
# Whose layers are those of another: tests of engines run that one.
ALIKE = {"mamba2", "falcon_mamba"}
# Layers of states alone.
SELECTIVE: dict[str, Any] = {"state_size": 6, "time_step_rank": 5, "num_hidden_layers": 2}
# Multiples of 64, which the cache of transformers rounds widths to.
XLSTM: dict[str, Any] = {"hidden_size": 128, "num_heads": 4, "ffn_round_up_to_multiple_of": 8, "chunk_size": CHUNK}
ZAYA: dict[str, Any] = {
    "num_hidden_layers": 3, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24,
    "router_hidden_size": 16, "tie_word_embeddings": True,
}  # fmt: skip
# By a name for the test: `model_type`, and settings beside the usual ones of `conftest.TINY`.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "xlstm": ("xlstm", XLSTM),
    "zaya": ("zaya", ZAYA),
    "zaya, windows": (
        "zaya",
        ZAYA | {"sliding_window": 5, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "lm_head_bias": True},
    ),
    "lfm2": ("lfm2", CONVOLVED),
    "lfm2, biases": ("lfm2", CONVOLVED | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", CONVOLVED | EXPERTS | {"num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    "qwen3_next": ("qwen3_next", DELTA | EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_next, dense": ("qwen3_next", DELTA | {"num_experts": 0, "linear_num_key_heads": 4}),
    "qwen3_5": ("qwen3_5_text", DELTA | {"rope_parameters": TURNED}),
    "granitemoehybrid, mamba": ("granitemoehybrid", HYBRID | {"num_local_experts": 0, "mamba_proj_bias": True}),
    "granitemoehybrid, mamba and experts": (
        "granitemoehybrid",
        HYBRID | {"num_local_experts": 4, "num_experts_per_tok": 2, "mamba_conv_bias": False},
    ),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1, normed": (
        "falcon_h1",
        FALCON
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "ssm_in_multiplier": 1.0,
        },
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h, latent": ("nemotron_h", NEMOTRON | {"moe_latent_size": 16, "use_bias": True, "n_groups": 1}),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
            "num_experts_per_tok": 2, "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"num_hidden_layers": 4, "hidden_size": 64, "attention_window_size": 6, "lru_width": 64, "block_types":
         ["recurrent", "attention"], "logits_soft_cap": 4.0},
    ),
    "zamba": (
        "zamba",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4,
            "n_mamba_heads": 2, "mamba_d_state": 6, "mamba_dt_rank": 5, "mamba_proj_bias": True,
            "use_mamba_kernels": False, "tie_word_embeddings": True,
        },
    ),
    "zamba, plain": (
        "zamba",
        {
            "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_d_state": 6,
            "mamba_dt_rank": 5, "mamba_conv_bias": False, "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 5, "num_key_value_heads": 4, "n_mamba_heads": 6, "mamba_ngroups": 2,
            "mamba_d_state": 8, "chunk_size": CHUNK, "num_mem_blocks": 2, "use_shared_attention_adapter": True,
            "adapter_rank": 6, "use_mem_rope": True, "time_step_min": 1e-6, "tie_word_embeddings": True,
        },
    ),
    "zamba2, plain": (
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_d_state": 8,
            "chunk_size": CHUNK, "add_bias_linear": True, "adapter_rank": 6, "time_step_min": 1e-6,
        },
    ),
    "mamba": ("mamba", SELECTIVE | {"use_bias": True}),
    "falcon_mamba": ("falcon_mamba", SELECTIVE | {"tie_word_embeddings": True, "use_conv_bias": False}),
    "mamba2": (
        "mamba2",
        {"num_hidden_layers": 2, "num_heads": 6, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": CHUNK},
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_attention_heads": 4, "num_key_value_heads": 4, "linear_head_dim": 6, "linear_num_heads": 4,
            "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
            "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "minimax": (
        "minimax",
        {
            "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "block_size": 8,
            "linear_attn_alpha_factor": 1.5, "linear_attn_beta_factor": 0.7, "full_attn_alpha_factor": 0.8,
            "full_attn_beta_factor": 1.3, "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.2,
        },
    ),
    "olmo_hybrid": (
        "olmo_hybrid",
        {name: value for name, value in DELTA.items() if "shared" not in name and name != "head_dim"},
    ),
    "olmo_hybrid, no positions": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4,
            "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 12,
            "linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "qwen3_5, experts": ("qwen3_5_moe_text", DELTA | EXPERTS),
}  # fmt: skip
