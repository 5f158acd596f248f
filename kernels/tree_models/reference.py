"""transformers' own models: the oracle of our layers. Nothing else here imports transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tree_models.weights.checkpoint import TensorsInMemory


def published_tensors(model: Any) -> TensorsInMemory:
    """The tensors of a transformers model, by the names that checkpoints have; memory is shared where it can be."""
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return TensorsInMemory({name: tensor for name, tensor in state.items() if name not in ties})
