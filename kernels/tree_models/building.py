"""Decoders from descriptions and checkpoints."""

from __future__ import annotations

from tree_models.families import Description
from tree_models.layers.decoder import Decoder
from tree_models.layers.placing import Placement
from tree_models.weights.checkpoint import Checkpoint
from tree_models.weights.loading import load_slots


def build(description: Description, checkpoint: Checkpoint, place: Placement) -> Decoder:
    """The decoder of a description with the weights of a checkpoint.

    Raises:
        FamilyRefused: the description asks for what is not computed.
        CheckpointRefused: the checkpoint's tensors are not the decoder's.
    """
    decoder = Decoder(description.spec, description.names, place).eval()
    load_slots(decoder.slots(), checkpoint, description.names.ignored)
    return decoder
