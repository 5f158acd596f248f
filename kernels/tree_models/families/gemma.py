"""Gemma 1."""

from __future__ import annotations

from typing import Any

from tree_models.families.common import Description, attention, counted, decoder, layer, mlp, rms_norm
from tree_models.names import WeightNames
from tree_models.spec import FamilyRefused


def gemma(config: Any) -> Description:
    """Gemma 1: scaled embeddings, weights of norms less one."""
    if getattr(config, "use_bidirectional_attention", False):
        raise FamilyRefused("its tokens see later ones")
    norm = rms_norm(config, offset=1.0)
    layers = [layer(attention(config, index), mlp(config, bias=False), norm) for index in counted(config)]
    return Description(decoder(config, layers, norm, embedding_scale=float(config.hidden_size) ** 0.5), WeightNames())
