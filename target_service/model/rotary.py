"""Rotary frequencies that depend on the length of a text, held at those of texts within the model's context.

transformers looks at the greatest position of every pass to choose them, which a captured pass cannot wait for. Within
the length for which a model is served (`support.longest_context`) they are always the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# As transformers names frequencies that no length changes.
_FIXED = "default"
_BY_LENGTH = ("dynamic", "longrope")


def hold_frequencies(model: PreTrainedModel) -> None:
    """Keep every rotary module's frequencies as they are now. Before any long text was run."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in _BY_LENGTH:
            module.rope_type = _FIXED
        elif isinstance(kind, dict):
            module.rope_type = {layer: _FIXED if one in _BY_LENGTH else one for layer, one in kind.items()}
