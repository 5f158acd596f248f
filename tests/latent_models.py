"""Small checkpoints with latent attention, in the layouts that DeepSeek publishes, with random weights."""

from __future__ import annotations

from typing import Any

from conftest import make_tiny
from transformers import PreTrainedModel

# Queries and keys of 24, values of 12, latents of 16 beside rotary keys of 8.
_WIDTHS: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
# Of DeepSeek-V2-Lite's kind: scores are scaled by more than the width of a query.
_YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
}
_GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
V2 = _WIDTHS | _EXPERTS
V3 = _WIDTHS | _EXPERTS | {"q_lora_rank": 24, "routed_scaling_factor": 2.5}
MISTRAL4 = V3 | {
    "n_shared_experts": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
LONGCAT = V3 | {
    "num_layers": 2, "num_hidden_layers": 4, "head_dim": 8, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16,
    "moe_topk": 3, "zero_expert_num": 3,
}  # fmt: skip
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2, one query projection": ("deepseek_v2", V2),
    "v2, yarn, query latents, groups": (
        "deepseek_v2", V2 | _YARN | _GROUPS | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"},
    ),
    "v2, one dense layer": ("deepseek_v2", V2 | {"num_hidden_layers": 1}),
    "v3": ("deepseek_v3", V3 | _YARN | _GROUPS | {"num_hidden_layers": 3}),
    "v3, one query projection, halves": ("deepseek_v3", V3 | {"q_lora_rank": None, "rope_interleave": False}),
}  # fmt: skip


def make_latent(name: str) -> PreTrainedModel:
    """A checkpoint by its name above, the same for every call."""
    model_type, settings = CHECKPOINTS[name]
    return make_tiny(model_type, **settings)
