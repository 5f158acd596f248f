"""Tiny models with random weights whose layers have windows, shorter than prompts, capped scores or sinks; and prompts
to try them with."""

from __future__ import annotations

import random
from typing import Any

import torch
from conftest import make_tiny
from engine_harness import request
from transformers import PreTrainedModel

from outrider.sampling import SamplingParams
from target_service.core.sequence import SequenceRequest

VOCABULARY = 211
GREEDY = SamplingParams(ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=99, ignore_eos=True)
MAX_TOKENS = 14

EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 24, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# By a name for the test: `model_type`, and settings beside the usual ones of `conftest.TINY`.
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "ministral, windows": (
        "ministral", {"sliding_window": 6, "head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3, windows": (
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "smollm3, windows": (
        "smollm3",
        {
            "num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0, "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "phi3, window": ("phi3", {"rope_parameters": PARTIAL, "sliding_window": 7}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 4}),
    "mixtral, window": ("mixtral", EXPERTS | {"sliding_window": 4}),
    "qwen3_moe, windows": (
        "qwen3_moe", EXPERTS | {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5},
    ),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 40, "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
        },
    ),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 0.5}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 3, "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 5, "head_dim": 12, "sliding_window": 5, "num_kv_shared_layers": 2, "laurel_rank": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                            "full_attention"],
            "altup_num_inputs": 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 211,
            "activation_sparsity_pattern": [0.6, 0.0, 0.0, 0.8, 0.0], "final_logit_softcapping": 1.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": (
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": 211,
                  "hidden_size_per_layer_input": 8},
    ),
    "gemma4, experts": (
        "gemma4_text",
        GEMMA4 | {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 1.5},
    ),
    "olmo3": (
        "olmo3",
        {
            "sliding_window": 5, "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                   "original_max_position_embeddings": 128},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "cohere2": ("cohere2", {"logit_scale": 0.25, "sliding_window": 5, "num_hidden_layers": 4}),
    "cohere2_moe": (
        "cohere2_moe",
        {
            "logit_scale": 0.25, "sliding_window": 5, "num_hidden_layers": 4, "sliding_window_pattern": 3,
            "head_dim": 12, "num_experts": 4, "num_shared_experts": 1, "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 64,
        },
    ),
    "cohere2_moe, sigmoid": (
        "cohere2_moe",
        {
            "sliding_window": 5, "head_dim": 12, "num_experts": 4, "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5, "num_shared_experts": 2, "shared_expert_combination_strategy": "sum",
        },
    ),
    "cwm": (
        "cwm",
        {"head_dim": 16, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"],
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "exaone4": ("exaone4", {"sliding_window": 5, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "exaone4, full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone_moe": (
        "exaone_moe",
        EXPERTS | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 5, "routed_scaling_factor": 2.5},
    ),
    "granite_swa": (
        "granite_swa",
        {
            "sliding_window": 5, "num_hidden_layers": 4, "layer_rope_theta": [0, 1e4, 5e5, 1e4],
            "residual_multiplier": 0.5,
        },
    ),
    "granitemoe_swa": (
        "granitemoe_swa", EXPERTS | {"sliding_window": 5, "shared_intermediate_size": 24, "num_hidden_layers": 2},
    ),
    "gpt_oss": (
        "gpt_oss",
        EXPERTS | {"head_dim": 16, "sliding_window": 5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        }},
    ),
    "mimo_v2": (
        "mimo_v2_flash",
        EXPERTS | {
            "num_hidden_layers": 4, "head_dim": 16, "v_head_dim": 12, "sliding_window": 5, "num_attention_heads": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2, "n_routed_experts": 4,
            "rope_parameters": {"full_attention": PARTIAL, "sliding_attention": PARTIAL | {"rope_theta": 100.0}},
        },
    ),
    "laguna": (
        "laguna",
        EXPERTS | {
            "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "num_attention_heads_per_layer": [4, 8, 4],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "shared_expert_intermediate_size": 24, "moe_routed_scaling_factor": 2.5,
        },
    ),
    "laguna, gates of numbers": (
        "laguna", EXPERTS | {"head_dim": 16, "shared_expert_intermediate_size": 24, "gating": "per-element"},
    ),
    "afmoe": (
        "afmoe",
        EXPERTS | {
            "num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "global_attn_every_n_layers": 2,
            "num_shared_experts": 1, "route_scale": 2.5, "mup_enabled": True,
        },
    ),
    "llama4, plain heads": (
        "llama4_text",
        {
            "head_dim": 12, "attention_chunk_size": 4, "num_local_experts": 4, "use_qk_norm": False,
            "attn_temperature_tuning": False, "no_rope_layer_interval": 2, "intermediate_size": 32,
        },
    ),
    "modernbert": (
        "modernbert-decoder",
        {
            "num_hidden_layers": 4, "local_attention": 10, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
            "classifier_bias": True,
        },
    ),
    "modernbert, tied": ("modernbert-decoder", {"local_attention": 8, "tie_word_embeddings": True}),
    "mellum": (
        "mellum",
        EXPERTS | {"head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}  # fmt: skip


def windowed_requests(sampling: SamplingParams) -> list[SequenceRequest]:
    """Prompts shorter and longer than windows; the last repeats itself."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (5, 17)]
    return [request(prompt, MAX_TOKENS, sampling=sampling) for prompt in (*prompts, prompts[0] * 6)]


def windowed_model(name: str) -> PreTrainedModel:
    """One of `WINDOWED`."""
    model_type, settings = WINDOWED[name]
    model = make_tiny(model_type, **settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.copy_(torch.linspace(-1.0, 2.0, len(parameter)))
    return model
