"""Fixtures that every area shares: a tiny model of each served family, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Small enough for a step of a millisecond, odd enough (grouped heads, vocabulary not a power of two) to catch mistakes.
TINY: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_tiny(model_type: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A random-weight model of `model_type` in fp32, the same for every call with the same arguments.

    Weights are scaled up so that distributions are peaked enough for drafts to be accepted now and then.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(TINY | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0 if "embed" in name or "lm_head" in name else 3.0)
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def tiny_model() -> PreTrainedModel:
    return make_tiny()
