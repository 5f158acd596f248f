"""One rank's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tree_models.decoder_spec import DecoderSpec
from tree_models.families import Description
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.names import WeightNames
from tree_models.rank_group import RankGroup, looked_up
from tree_models.ranks.cuts import Cut, RankTensors
from tree_models.ranks.share import share_of
from tree_models.slots import TensorSpec, specs_of
from tree_models.weights.checkpoint import TensorSource
from tree_models.weights.loading import check_names, load_slots, readers_for
from tree_models.weights.separate_experts import separated


class RankDecoder(Decoder):
    """Computes the whole decoder's logits together with the other ranks: every rank has all hidden rows and all logits,
    and its share of weights, keys and values."""

    def __init__(self, spec: DecoderSpec, names: WeightNames, place: Placement) -> None:
        """`spec` is of the whole decoder; `place` has the ranks. Raises `FamilyRefused` where they cannot share it."""
        assert place.ranks is not None, "a decoder without ranks is a `Decoder`"
        share = share_of(spec, names, place.ranks.rank, place.ranks.size)
        super().__init__(share.spec, names, place)
        self._ranks: RankGroup = place.ranks
        self._vocabulary_size = spec.vocabulary_size
        # The whole decoder's shapes.
        skeleton = Decoder(spec, names, replace(place, device=torch.device("meta"), ranks=None))
        self.whole_specs: Mapping[str, TensorSpec] = specs_of(skeleton.slots())
        self.cuts: Mapping[str, Cut] = share.cuts

    @property
    def vocabulary_size(self) -> int:
        """V, of the whole decoder."""
        return self._vocabulary_size

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """See `Decoder.embedding_rows`."""
        return looked_up(self.embedding, token_ids, self._ranks)

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., V] of rows [.., H] after the last norm."""
        return self._ranks.joined(super().logits(hidden))[..., : self._vocabulary_size]


def build_rank(description: Description, checkpoint: TensorSource, place: Placement) -> RankDecoder:
    """The decoder of the rank of `place.ranks`, with its part of a checkpoint of the whole decoder.

    Raises:
        FamilyRefused: the description asks for what is not computed, or cannot be divided by so many ranks.
        WeightsRefused: the checkpoint's tensors are not the whole decoder's.
    """
    decoder = RankDecoder(description.spec, description.names, place)
    decoder.eval()
    checkpoint = separated(checkpoint, description.names, description.spec.hidden_size)
    # The whole shapes first, as parts of wrong ones may fit.
    check_names(decoder.whole_specs, checkpoint.stored, description.names)
    tensors = RankTensors(checkpoint, decoder.cuts)
    load_slots(decoder.slots(), tensors, description.names, readers_for(place.device))
    return decoder
