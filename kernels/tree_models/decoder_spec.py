"""What a decoder computes around its layers, as data; the layers are described by `tree_models.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from tree_models.spec import Activation, LayerInputsSpec, LayerSpec, NormSpec, StreamsSpec


@dataclass(frozen=True, slots=True)
class PositionTableSpec:
    """A table of vectors that are added to embedded rows by their position."""

    rows: int
    offset: int = 0  # of the first position's row
    sines: bool = False  # sines and cosines stand in it, and no checkpoint has it


@dataclass(frozen=True, slots=True)
class HeadTransformSpec:
    """What the head reads of the last norm's rows: norm(activation(a product))."""

    activation: Activation
    norm: NormSpec
    bias: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder from token ids to logits."""

    vocabulary_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    max_positions: int
    tied: bool = False  # the head is the embedding
    unread_tokens: int = 0  # rows behind the vocabulary's in the published embedding, as of images
    head_bias: bool = False
    head_transform: HeadTransformSpec | None = None
    embedding_scale: float = 1.0
    embedding_norm: NormSpec | None = None  # of embedded rows
    positions: PositionTableSpec | None = None
    logits_scale: float = 1.0
    logits_cap: float | None = None
    layer_inputs: LayerInputsSpec | None = None
    streams: StreamsSpec | None = None  # of all layers
