"""Tiny EAGLE heads behind the passes of a tiny target."""

from __future__ import annotations

from typing import Any

from eagle_heads import make_head
from transformers import PreTrainedModel

from draft_service.eagle.config import EagleConfig
from draft_service.eagle.head import EagleHead
from draft_service.in_pass import InPassHead
from tree_models.layers.placing import Placement

VOCABULARY, LAYERS = 211, (0, 1, 2)
SETTINGS: dict[str, Any] = {
    "num_steps": 4, "topk": 3, "num_draft_tokens": 63, "min_score": 0.0, "dtype": "float32", "gumbel_candidates": 211,
    "kv_tokens": 4096, "cuda_graphs": True,
}  # fmt: skip


def head_of(model: PreTrainedModel, kept: int = 0) -> EagleHead:
    """A head on the model's device, whose layer comes behind `kept` others in the cache."""
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    made = make_head(
        hidden_size=width, target_hidden_size=width, vocab_size=vocabulary, draft_vocab_size=vocabulary,
        feature_layers=LAYERS, head_dim=12,
    )  # fmt: skip
    if not kept:
        return made
    behind = EagleHead(made.config, None, Placement(model.device, model.dtype), kept)
    for name, weight in behind.weights().items():
        weight.copy_(made.weights()[name])
    return behind.eval()


def in_pass_head(model: PreTrainedModel) -> InPassHead:
    """A head behind passes of the model, whose layers all have keys and values."""
    return InPassHead(head_of(model, model.config.num_hidden_layers), LAYERS, EagleConfig(**SETTINGS))
