"""Decoders from descriptions and checkpoints."""

from __future__ import annotations

from dataclasses import replace

import torch

from tree_models.families import Description
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.slots import specs_of
from tree_models.weights.checkpoint import TensorSource
from tree_models.weights.loading import check_names, load_slots, readers_for
from tree_models.weights.separate_experts import separated


def build(description: Description, checkpoint: TensorSource, place: Placement) -> Decoder:
    """The decoder of a description with the weights of a checkpoint.

    Raises:
        FamilyRefused: the description asks for what is not computed.
        WeightsRefused: the checkpoint's tensors are not the decoder's.
    """
    spec, names = description.spec, description.names
    checkpoint = separated(checkpoint, names, spec.hidden_size)
    # Before any memory is taken, since a configuration may describe more than there is.
    skeleton = Decoder(spec, names, replace(place, device=torch.device("meta")))
    check_names(specs_of(skeleton.slots()), checkpoint.stored, names)
    decoder = Decoder(spec, names, place).eval()
    load_slots(decoder.slots(), checkpoint, names, readers_for(place.device))
    return decoder
