"""Gemma 4's assistant as a network that drafts.

A row is a token and the target's state before it. Its layers have queries alone, which attend to the keys and values
of the target's last layer of their type; all rows of a tree stand behind the last of these keys, whatever their depth,
and see none of each other. What a row passes on to its children has the width of the target's states.

Symbols: R rows, W the target's hidden size, H the assistant's, V the vocabulary, K clusters that a row selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from draft_service.neural.network import RowOutput
from tree_models.families import Description
from tree_models.fused.preparing import LayerOptions, prepare_layers
from tree_models.layers.decoder import Decoder
from tree_models.layers.linear import Linear
from tree_models.layers.paged import CacheShape, PagedPass
from tree_models.layers.placing import Placement
from tree_models.slots import Copy, WeightSlot

# [R, W] of token ids and positions [R]: embedded as the target's first layer reads them.
Embed = Callable[[Tensor, Tensor], Tensor]


class Clusters(NamedTuple):
    """The vocabulary in clusters of equal size, of which a row has logits in the likeliest alone."""

    tokens: Tensor  # [clusters, V / clusters] int64, each token once
    selected: int  # clusters of a row, K


class Assistant(nn.Module):
    """Weights are unwritten until every slot of `slots` has been."""

    def __init__(
        self, description: Description, target_width: int, place: Placement, clusters: Clusters | None = None
    ) -> None:
        """`description` is that of `families.gemma.gemma4_assistant`."""
        super().__init__()
        self.decoder = Decoder(description.spec, description.names, place)
        width = description.spec.hidden_size
        self.before = Linear(2 * target_width, [width], place)
        self.behind = Linear(width, [target_width], place)
        self.clusters = clusters
        self.centroids = None if clusters is None else Linear(width, [len(clusters.tokens)], place)

    def prepare(self) -> None:
        """Make passes run by few launches, where the assistant is on a GPU in half precision."""
        decoder = self.decoder
        if decoder.embedding.is_cuda and decoder.embedding.element_size() == 2:
            prepare_layers(decoder, decoder.norm, decoder.head, LayerOptions(compiled=False))

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, step: PagedPass) -> RowOutput:
        """One pass over rows of tokens, as the target embeds them [R, W], and the states [R, W] before them, at
        positions [R]; `step` is planned for rows without keys."""
        rows: Tensor = self.before(torch.cat([embedded, states], dim=-1))
        hidden = self.decoder.normed(self.decoder.compute_layers(rows, self.decoder.angles(positions), step))
        return RowOutput(self.behind(hidden), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] to logits [R, V]: -inf for tokens outside the clusters that a row selects, where there are such."""
        if self.clusters is None or self.centroids is None:
            return self.decoder.logits(hidden)
        places = self.centroids(hidden).topk(self.clusters.selected, dim=-1).indices
        tokens = self.clusters.tokens[places].flatten(1)
        decoder = self.decoder
        head = decoder.embedding if decoder.spec.tied else decoder.head.weight
        logits = torch.bmm(functional.embedding(tokens, head), hidden[:, :, None])[..., 0]
        return logits.new_full((len(hidden), len(head)), float("-inf")).scatter_(1, tokens, logits)

    def slots(self, copy: Copy = Tensor.copy_) -> list[WeightSlot]:
        """Slots of every weight, by the names of transformers."""
        slots = [*self.decoder.slots(copy), *self.before.slots(["pre_projection"], copy)]
        slots += self.behind.slots(["post_projection"], copy)
        if self.centroids is not None:
            slots += self.centroids.slots(["masked_embedding.centroids"], copy)
        return slots


class AssistantNetwork:
    """An assistant as `neural.network.Network`. It keeps nothing of a sequence."""

    successors = 1
    cache_shapes: Sequence[CacheShape] = ()
    token_ids: npt.NDArray[np.int32] | None = None

    def __init__(self, assistant: Assistant, embed: Embed) -> None:
        self._assistant, self._embed = assistant, embed
        self.dtype, self.device = assistant.decoder.dtype, assistant.decoder.device

    def forward_rows(
        self,
        token_ids: Tensor,
        carried: Tensor | None,
        positions: Tensor,
        step: PagedPass,
        sources: Tensor | None = None,
    ) -> RowOutput:
        """See `Network.forward_rows`; carried are states [R, W]. `positions` are those behind the last key."""
        assert carried is not None, "an assistant reads states"
        if sources is not None:
            carried = carried.index_select(0, sources)
        output: RowOutput = self._assistant(self._embed(token_ids, positions), carried, positions, step)
        return output

    def logits(self, lm_input: Tensor) -> Tensor:
        """See `Network.logits`."""
        return self._assistant.logits(lm_input)
