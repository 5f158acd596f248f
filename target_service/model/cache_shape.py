"""Widths of the keys and values that a model hands to its attention, found by running it on one token.

Configurations name heads and widths in several ways, and families multiply them: JetMoE by its experts, GPT-BigCode by
whether its heads share one key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from target_service.model.support import ModelRefused, kv_shape
from tree_models.layers.paged import CacheShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = "outrider_probe"
# By model, since many runners may share one.
_found: WeakKeyDictionary[PreTrainedModel, CacheShape] = WeakKeyDictionary()


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """What one layer caches of a token, keys and values of all heads. Of the configuration, where the model does not
    hand them to attention that is put in its own's place. Raises `ModelRefused` where layers differ."""
    if model not in _found:
        shapes = _shapes(model)
        if len(set(shapes)) > 1:
            raise ModelRefused(
                f"{model.config.model_type}: layers with keys and values of several widths are not served"
            )
        _found[model] = shapes[0] if shapes else kv_shape(model.config)
    return _found[model]


def _shapes(model: PreTrainedModel) -> list[CacheShape]:
    """Of each layer in turn; none where the model cannot be run so."""
    shapes: list[CacheShape] = []

    def note(_module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        # [1, H, 1, D]
        shapes.append(CacheShape(key.shape[1], key.shape[-1], value.shape[-1]))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    # Its import takes seconds, which models with layers of ours do not need.
    from transformers import AttentionInterface

    AttentionInterface.register(_PROBE, note)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation(_PROBE)
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    # The check at load reports what else is wrong with it.
    except Exception:
        return []
    finally:
        model.set_attn_implementation(own)
    return shapes
