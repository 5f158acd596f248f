"""What one rank has of a head, where the target that it drafts behind is divided over several.

As of the target, each has a share of the attention heads and of every MLP's width, and a part of the draft vocabulary.
The token embedding, what fuses states, and norms are whole on every rank: one launch makes a head's input of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draft_service.checkpoints.target import LM_HEAD
from draft_service.eagle.head_config import LayeredShape
from tree_models.rank_group import RankGroup
from tree_models.ranks.cuts import Cut, Spans
from tree_models.ranks.share import share_of_layers
from tree_models.spec import FamilyRefused, LayerSpec


class HeadShare(NamedTuple):
    """A rank's part of a head, or all of it."""

    layers: Sequence[LayerSpec]
    tokens: int  # of the draft vocabulary
    cuts: Mapping[str, Cut]  # of tensors by their names in `EagleHead.slots`


def share_of_head(config: LayeredShape, ranks: RankGroup | None) -> HeadShare:
    """The share of one of `ranks`. Raises `FamilyRefused` where they cannot divide the head."""
    if ranks is None:
        return HeadShare(config.layers, config.draft_vocab_size, {})
    layers, cuts = share_of_layers(config.layers, config.names, ranks.rank, ranks.size, config.hidden_size)
    tokens, rest = divmod(config.draft_vocab_size, ranks.size)
    if rest:
        raise FamilyRefused(f"{ranks.size} ranks: {config.draft_vocab_size} draft tokens cannot be divided by them")
    cuts[LM_HEAD] = Spans(0, (range(ranks.rank * tokens, (ranks.rank + 1) * tokens),))
    return HeadShare(layers, tokens, cuts)
