"""Families of models: a function each, from a configuration of transformers to a description and names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tree_models.families import (
    deepseek,
    ernie,
    gemma,
    glm,
    granite,
    lfm,
    llama,
    mixtures,
    olmo,
    others,
    phi,
    qwen,
)
from tree_models.families.common import Description, Family

__all__ = ["FAMILIES", "Description", "Family", "describe"]

# By the name that config.json has as `model_type`.
FAMILIES: Mapping[str, Family] = {
    "afmoe": mixtures.afmoe,
    "apertus": others.apertus,
    "arcee": llama.arcee,
    "bamba": granite.bamba,
    "cohere": others.cohere,
    "cohere2": others.cohere2,
    "cohere2_moe": others.cohere2_moe,
    "cwm": llama.mistral,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "dots1": glm.dots1,
    "ernie4_5": ernie.ernie4_5,
    "ernie4_5_moe": ernie.ernie4_5_moe,
    "exaone4": others.exaone4,
    "exaone_moe": mixtures.exaone_moe,
    "falcon_h1": granite.falcon_h1,
    "flex_olmo": olmo.flex_olmo,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3_text": gemma.gemma3,
    "gemma4_text": gemma.gemma4,
    "gemma4_unified_text": gemma.gemma4,
    "glm": glm.glm,
    "glm4": glm.glm4,
    "glm4_moe": glm.glm4_moe,
    "glm4v_moe_text": glm.glm4v_moe,
    "glm4v_text": glm.glm4v,
    "glm4_moe_lite": deepseek.deepseek_v3,
    "gpt_oss": mixtures.gpt_oss,
    "granite": granite.granite,
    "granite_swa": granite.granite_swa,
    "granitemoe": granite.granitemoe,
    "granitemoe_swa": granite.granitemoe_swa,
    "granitemoehybrid": granite.granitemoehybrid,
    "granitemoeshared": granite.granitemoe,
    "hunyuan_v1_dense": mixtures.hunyuan_dense,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "hy_v3": mixtures.hy_v3,
    "hyperclovax": granite.hyperclovax,
    "jamba": granite.jamba,
    "jais2": others.jais2,
    "kimi_linear": deepseek.kimi_linear,
    "laguna": mixtures.laguna,
    "lfm2": lfm.lfm2,
    "lfm2_moe": lfm.lfm2_moe,
    "llama": llama.llama,
    "mellum": qwen.qwen3_moe,
    "mimo_v2_flash": mixtures.mimo_v2,
    "minicpm3": deepseek.minicpm3,
    "minimax": mixtures.minimax,
    "minimax_m2": mixtures.minimax_m2,
    "ministral": llama.mistral,
    "ministral3": llama.ministral3,
    "mistral": llama.mistral,
    "mixtral": mixtures.mixtral,
    "muse_glimmer_text": gemma.muse_glimmer,
    "nemotron": others.nemotron,
    "nemotron_h": others.nemotron_h,
    "olmo": olmo.olmo,
    "olmo2": olmo.olmo2,
    "olmo3": olmo.olmo3,
    "olmo_hybrid": olmo.olmo_hybrid,
    "olmoe": olmo.olmoe,
    "phi": phi.phi,
    "phi3": phi.phi3,
    "phimoe": phi.phimoe,
    "qwen2": qwen.qwen2,
    "qwen2_5_vl_text": qwen.qwen2_vl,
    "qwen2_moe": qwen.qwen2_moe,
    "qwen2_vl_text": qwen.qwen2_vl,
    "qwen3": qwen.qwen3,
    "qwen3_5_moe_text": qwen.qwen3_5,
    "qwen3_5_text": qwen.qwen3_5,
    "qwen3_moe": qwen.qwen3_moe,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_vl_moe_text": qwen.qwen3_vl_moe,
    "qwen3_vl_text": qwen.qwen3_vl,
    "seed_oss": llama.seed_oss,
    "smollm3": llama.smollm3,
    "solar_open": glm.solar_open,
    "stablelm": others.stablelm,
    "starcoder2": others.starcoder2,
    "vaultgemma": gemma.vaultgemma,
    "youtu": deepseek.youtu,
}


def describe(config: Any) -> Description | None:
    """The description of a configuration; None where its family has no entry. Raises `FamilyRefused` where the
    configuration asks for what its family's layers do not compute."""
    family = FAMILIES.get(str(config.model_type))
    return None if family is None else family(config)
