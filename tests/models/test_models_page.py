"""docs/models.md names every family, and counts those of transformers' causal language models that have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tree_models.families import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_every_family_is_named() -> None:
    # One name stands for those that differ in their own config name alone.
    named = {*re.findall(r"`([a-z0-9_-]+)`", PAGE), "deepseek_v2", "glm4_moe_lite", "minicpm3", "youtu"}
    assert set(FAMILIES) <= named


@pytest.mark.skipif(len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) != 178, reason="the page counts those of transformers 5.17")
def test_the_count_is_that_of_families() -> None:
    served = [model_type for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if has_entry(model_type)]
    assert f"| {len(served)} | run in Outrider's layers" in PAGE


def has_entry(model_type: str) -> bool:
    """Whether the type, or the part for text of its default configuration, has an entry."""
    if model_type in FAMILIES:
        return True
    try:
        text = AutoConfig.for_model(model_type).get_text_config()
    # Some have no default configuration.
    except Exception:
        return False
    return text.model_type in FAMILIES
