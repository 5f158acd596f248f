"""Hidden states on the wire to plain values and back; the rules are those of `outrider.wire.trees`.

A tensor here is its type, its shape and bytes: its reader checks that the elements are finite.
"""

from __future__ import annotations

import math

from outrider.errors import InvalidField, QuotaExceeded, check_most
from outrider.v1 import draft_pb2, tree_pb2
from outrider.wire.frames import ELEMENT_BYTES, MAX_FEATURE_BYTES, FeatureRequest, SequenceFeatures, Vectors
from outrider.wire.same_names import message_of, value_of

# Chosen, all three.
MAX_LAYERS = 16
MAX_WIDTH = 131072
_DTYPES_TO_PB = {name: tree_pb2.Tensor.DType.Value(f"D_TYPE_{name.upper()}") for name in ELEMENT_BYTES}
_DTYPES = {number: name for name, number in _DTYPES_TO_PB.items()}


def _dtype_from_pb(number: tree_pb2.Tensor.DType.ValueType, owner_path: str) -> str:
    if number not in _DTYPES:
        raise InvalidField(f"{owner_path}.dtype", f"{number} is no known element type")
    return _DTYPES[number]


def vectors_from_pb(pb: tree_pb2.Tensor, field_path: str) -> Vectors:
    """Vectors whose shape, bytes and scales agree. Raises `InvalidField`, or `QuotaExceeded` for too many bytes."""
    # Every read of a message's field makes an object, of `data` a copy.
    shape, data = tuple(pb.shape), pb.data
    dtype = _dtype_from_pb(pb.dtype, field_path)
    if len(shape) != 2 or 0 in shape or shape[1] > MAX_WIDTH:
        raise InvalidField(f"{field_path}.shape", f"is {list(shape)}, not [rows, width]")
    rows, width = shape
    size = rows * width * ELEMENT_BYTES[dtype]
    if len(data) != size:
        raise InvalidField(f"{field_path}.data", f"needs {size} bytes, has {len(data)}")
    if size > MAX_FEATURE_BYTES and rows > 1:
        raise QuotaExceeded("too many features in one piece", bytes=size, limit=MAX_FEATURE_BYTES)
    scales = tuple(pb.row_scales)
    if len(scales) not in (0, rows):
        raise InvalidField(f"{field_path}.row_scales", f"needs {rows} entries or none, has {len(scales)}")
    for i, scale in enumerate(scales):
        if not (math.isfinite(scale) and scale > 0.0):
            raise InvalidField(f"{field_path}.row_scales[{i}]", "is not finite and positive")
    return Vectors(dtype, width, data, scales)


def vectors_to_pb(vectors: Vectors) -> tree_pb2.Tensor:
    """The vectors as a tensor [count, width]."""
    return tree_pb2.Tensor(
        dtype=_DTYPES_TO_PB[vectors.dtype],
        shape=(vectors.rows, vectors.width),
        data=vectors.data,
        row_scales=vectors.scales,
    )


def features_from_pb(pb: draft_pb2.SequenceFeatures, field_path: str) -> SequenceFeatures:
    """Checked features of one sequence. Whether their positions fit the sequence is checked by its owner."""
    return SequenceFeatures(pb.sequence_id, pb.position, vectors_from_pb(pb.features, f"{field_path}.features"))


def features_to_pb(features: SequenceFeatures) -> draft_pb2.SequenceFeatures:
    return draft_pb2.SequenceFeatures(
        sequence_id=features.sequence_id, position=features.position, features=vectors_to_pb(features.vectors)
    )


def request_from_pb(pb: draft_pb2.FeatureRequest) -> FeatureRequest:
    """The hidden states that a drafter requests, within bounds. Whether the target has such layers is checked later."""
    if not 1 <= len(pb.layers) <= MAX_LAYERS:
        raise InvalidField("features.layers", f"needs 1 to {MAX_LAYERS} entries, has {len(pb.layers)}")
    if not 1 <= pb.width <= MAX_WIDTH:
        raise InvalidField("features.width", f"is not in 1..{MAX_WIDTH}")
    check_most("features.projection_fingerprint", len(pb.projection_fingerprint), 64, "characters")
    dtype = _dtype_from_pb(pb.dtype, "features")
    return value_of(FeatureRequest, pb, dtype=dtype)


def request_to_pb(request: FeatureRequest) -> draft_pb2.FeatureRequest:
    return message_of(draft_pb2.FeatureRequest, request, dtype=_DTYPES_TO_PB[request.dtype])
