"""Tiny models with random weights of the text of models that read images too."""

from __future__ import annotations

from typing import Any

import torch
from conftest import TINY
from latent_models import MISTRAL4
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Positions of time, height and width, by pairs of a head of 16.
THREEFOLD = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_WIDTHS: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16}
# By a name for the test: `model_type`, and settings beside the usual ones of `conftest.TINY`.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl_text", {"hidden_size": 64, "rope_parameters": THREEFOLD}),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {
            "hidden_size": 64, "rope_parameters": THREEFOLD, "use_sliding_window": True, "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen2_5_omni": ("qwen2_5_omni_text", {"hidden_size": 64, "rope_parameters": THREEFOLD}),
    "qwen3_omni_moe": (
        "qwen3_omni_moe_text",
        EXPERTS | {"head_dim": 16, "mlp_only_layers": [0], "rope_parameters": THREEFOLD | {"mrope_interleaved": True}},
    ),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 16, "rope_parameters": THREEFOLD | {"mrope_interleaved": True}}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        EXPERTS | {"head_dim": 16, "mlp_only_layers": [0], "rope_parameters": THREEFOLD | {"mrope_interleaved": True}},
    ),
    "glm4v": (
        "glm4v_text",
        {
            "hidden_size": 64,
            "rope_parameters": THREEFOLD | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
    ),
    "glm4v_moe": (
        "glm4v_moe_text",
        {
            "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
            "moe_intermediate_size": 16, "routed_scaling_factor": 2.5,
            "rope_parameters": THREEFOLD | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
    ),
    "muse_glimmer": (
        "muse_glimmer_text",
        {
            "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5, "qk_scale_factor": 1.7,
            "output_multiplier": 0.3, "final_logit_softcapping": 1.5,
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4, "head_dim": 12, "attention_chunk_size": 5, "num_local_experts": 4,
            "intermediate_size_mlp": 64, "intermediate_size": 32, "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3, "floor_scale": 3,
        },
    ),
    "cohere_compass": (
        "cohere_compass_text",
        {
            "hidden_size": 64, "sliding_window": 5, "logit_scale": 0.25, "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": THREEFOLD | {"mrope_section": [3, 3, 2]}, "full_attention": None},
        },
    ),
    "cosmos3_edge": ("cosmos3_edge_text", {"head_dim": 16, "rope_parameters": THREEFOLD}),
    "mllama": (
        "mllama_text_model", {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "tie_word_embeddings": False},
    ),
    "phi4_multimodal": (
        "phi4_multimodal",
        {
            "vision_config": {
                **_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "crop_size": 28,
                "feature_layer": -1,
            },
            "audio_config": {
                **_WIDTHS, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 16,
                "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16,
            },
        },
    ),
    "mistral4": ("mistral4", MISTRAL4),
    "step": (
        "step3p5",
        {
            "num_hidden_layers": 3, "num_sliding_attention_heads": 8, "sliding_window": 5, "head_dim": 12,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "share_expert_dim": 24, "moe_router_scaling_factor": 2.5,
            "swiglu_limits": [None, 0.05, None], "swiglu_limits_shared": [0.05, 0.05, None],
        },
    ),
    "aria": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 24}),
    "ernie4_5_vl": (
        "ernie4_5_vl_moe_text",
        {
            "head_dim": 16, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 8],
            "moe_num_shared_experts": 1, "rope_parameters": THREEFOLD | {"mrope_section": [3, 3, 2]},
        },
    ),
    "emu3": ("emu3_text_model", {"num_key_value_heads": 2, "pad_token_id": 0}),
}  # fmt: skip

_QWEN: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4}
_DEEP: dict[str, Any] = {
    **_QWEN, **_WIDTHS, "out_hidden_size": 48, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
# Of the whole models, by the same names: `model_type`, and settings of the part that reads images.
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", {**_QWEN, "embed_dim": 16, "hidden_size": 64, "mlp_ratio": 1}),
    "qwen2_5_vl": ("qwen2_5_vl", {**_QWEN, **_WIDTHS, "out_hidden_size": 64, "fullatt_block_indexes": [0]}),
    "qwen3_vl": ("qwen3_vl", _DEEP),
    "qwen3_vl_moe": ("qwen3_vl_moe", _DEEP),
    "glm4v": ("glm4v", {**_QWEN, **_WIDTHS, "out_hidden_size": 64, "image_size": 16}),
    "glm4v_moe": ("glm4v_moe", {**_QWEN, **_WIDTHS, "out_hidden_size": 48, "image_size": 16}),
    "muse_glimmer": (
        "muse_glimmer",
        {
            **_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
    ),
    "llama4": (
        "llama4",
        {
            **_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16,
            "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
        },
    ),
    "cohere_compass": ("cohere_compass", {**_DEEP, "out_hidden_size": 64}),
    "cosmos3_edge": (
        "cosmos3_edge",
        {**_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "num_patches": 16},
    ),
    "mllama": (
        "mllama",
        {
            **_WIDTHS, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 32,
            "image_size": 16, "patch_size": 4, "intermediate_layers_indices": [0], "max_num_tiles": 1,
            "supported_aspect_ratios": [[1, 1]],
        },
    ),
    "mistral4": (
        "mistral3",
        {
            **_WIDTHS, "model_type": "pixtral", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
            "image_size": 16, "patch_size": 4,
        },
    ),
    "step": (
        "step3p7",
        {**_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16},
    ),
    "aria": (
        "aria",
        {**_WIDTHS, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4, "image_size": 16},
    ),
    "ernie4_5_vl": ("ernie4_5_vl_moe", {**_QWEN, **_WIDTHS}),
    "emu3": (
        "emu3",
        {
            "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [],
            "hidden_size": 32, "codebook_size": 16,
        },
    ),
}  # fmt: skip
# Above all words of `self_check`.
_IMAGE_TOKENS = (
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id",
)  # fmt: skip


def whole_model(name: str, *, tied: bool = False) -> PreTrainedModel:
    """One of `WHOLE` with random weights in fp32, around the text of `TEXT_PARTS`. It says whether its head is tied;
    its text does not."""
    model_type, vision = WHOLE[name]
    of_text, settings = TEXT_PARTS[name]
    text = {**TINY, "vocab_size": 300, "model_type": of_text}
    del text["tie_word_embeddings"]
    text |= settings
    others = {"out_hidden_size": 64, "projector_hidden_size": 16} if model_type == "muse_glimmer" else {}
    others |= {"projector_hidden_size": 16} if model_type == "cosmos3_edge" else {}
    others |= {"vocabulary_map": {"<image>": 299}} if model_type == "emu3" else dict.fromkeys(_IMAGE_TOKENS, 299)
    torch.manual_seed(0)
    others["vq_config" if model_type == "emu3" else "vision_config"] = vision
    config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=tied, **others)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape))
    return model.eval()  # type: ignore[no-any-return]
