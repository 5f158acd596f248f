"""Features on the wire: what goes in comes out, and a tensor that is not what it says is refused by its field."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.errors import InvalidField, QuotaExceeded
from outrider.v1 import draft_pb2, tree_pb2
from outrider.wire.drafts import advance_from_pb, advance_to_pb, info_from_pb, info_to_pb
from outrider.wire.frames import (
    MAX_FEATURE_BYTES,
    DraftInfo,
    FeatureRequest,
    SequenceAdvance,
    SequenceFeatures,
    TreeLimits,
    Vectors,
)
from outrider.wire.hidden_states import features_from_pb, features_to_pb, vectors_from_pb, vectors_to_pb

WIDTH = 4
Tensor = tree_pb2.Tensor


def vectors(rows: int, dtype: str = "bfloat16", scales: tuple[float, ...] = ()) -> Vectors:
    return Vectors(dtype, WIDTH, bytes(range(rows * WIDTH * {"float32": 4, "bfloat16": 2}.get(dtype, 1))), scales)


VECTORS = {
    "float32": vectors(3, "float32"),
    "bfloat16": vectors(1),
    "float8 with scales": vectors(2, "float8_e4m3", (0.5, 2.0)),
}


@pytest.mark.parametrize("value", VECTORS.values(), ids=VECTORS)
def test_features_come_back_equal(value: Vectors) -> None:
    assert vectors_from_pb(Tensor.FromString(vectors_to_pb(value).SerializeToString()), "features") == value
    advance = SequenceAdvance(3, 4, (1, 2, 99), value)
    assert advance_from_pb(draft_pb2.SequenceAdvance.FromString(advance_to_pb(advance).SerializeToString()), 100) == (
        advance
    )
    features = SequenceFeatures(8, 7000, value)
    wire = features_to_pb(features).SerializeToString()
    assert features_from_pb(draft_pb2.SequenceFeatures.FromString(wire), "features") == features


def test_a_count_follows_from_the_bytes() -> None:
    assert [value.rows for value in VECTORS.values()] == [3, 1, 2]


def test_what_a_drafter_wants_comes_back_equal() -> None:
    for wanted in (
        FeatureRequest((1, 5, 8), 64),
        FeatureRequest(
            (30,), 2, "float8_e4m3", projected=True, required=False, window=512, projection_fingerprint="ab" * 32
        ),
    ):
        info = DraftInfo("eagle", 49152, "ab" * 32, TreeLimits(63, 16), 8192, "0.1.0", wanted)
        assert info_from_pb(info_to_pb(info)) == info


def tensor(**fields: object) -> tree_pb2.Tensor:
    whole = {"dtype": Tensor.D_TYPE_BFLOAT16, "shape": [2, WIDTH], "data": bytes(16)}
    return Tensor(**(whole | fields))  # type: ignore[arg-type]


MALFORMED = {
    "no type": (tensor(dtype=0), "features.dtype"),
    "unknown type": (tensor(dtype=17), "features.dtype"),
    "no shape": (tensor(shape=[]), "features.shape"),
    "one axis": (tensor(shape=[8]), "features.shape"),
    "three axes": (tensor(shape=[2, 2, 2]), "features.shape"),
    "no rows": (tensor(shape=[0, WIDTH], data=b""), "features.shape"),
    "no width": (tensor(shape=[2, 0], data=b""), "features.shape"),
    "enormous width": (tensor(shape=[1, 1 << 31]), "features.shape"),
    "bytes missing": (tensor(data=bytes(15)), "features.data"),
    "bytes left over": (tensor(data=bytes(17)), "features.data"),
    "another type's bytes": (tensor(dtype=Tensor.D_TYPE_FLOAT32), "features.data"),
    "scales missing": (tensor(row_scales=[1.0]), "features.row_scales"),
    "scale of zero": (tensor(row_scales=[1.0, 0.0]), "features.row_scales[1]"),
    "negative scale": (tensor(row_scales=[-1.0, 1.0]), "features.row_scales[0]"),
    "scale that is no number": (tensor(row_scales=[float("nan"), 1.0]), "features.row_scales[0]"),
    "infinite scale": (tensor(row_scales=[1.0, float("inf")]), "features.row_scales[1]"),
}


@pytest.mark.parametrize(("pb", "field"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_tensors_are_refused(pb: tree_pb2.Tensor, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        vectors_from_pb(pb, "features")
    assert caught.value.field == field


def test_a_piece_has_a_largest_size() -> None:
    rows = MAX_FEATURE_BYTES // (2 * WIDTH)
    assert vectors_from_pb(tensor(shape=[rows, WIDTH], data=bytes(MAX_FEATURE_BYTES)), "features").rows == rows
    with pytest.raises(QuotaExceeded):
        vectors_from_pb(tensor(shape=[rows + 1, WIDTH], data=bytes(MAX_FEATURE_BYTES + 2 * WIDTH)), "features")


def test_a_single_vector_may_be_larger() -> None:
    width = 131072
    wide = Tensor(dtype=Tensor.D_TYPE_FLOAT32, shape=[1, width], data=bytes(4 * width))
    assert vectors_from_pb(wide, "features").width == width


WRONG_REQUESTS: dict[str, tuple[Callable[[draft_pb2.FeatureRequest], object], str]] = {
    "no layers": (lambda pb: pb.ClearField("layers"), "features.layers"),
    "too many layers": (lambda pb: pb.layers.extend(range(20)), "features.layers"),
    "no width": (lambda pb: pb.ClearField("width"), "features.width"),
    "enormous width": (lambda pb: setattr(pb, "width", 1 << 30), "features.width"),
    "no type": (lambda pb: pb.ClearField("dtype"), "features.dtype"),
    "long fingerprint": (
        lambda pb: setattr(pb, "projection_fingerprint", "a" * 65),
        "features.projection_fingerprint",
    ),
}


@pytest.mark.parametrize(("change", "field"), WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
def test_requests_have_bounds(change: Callable[[draft_pb2.FeatureRequest], object], field: str) -> None:
    pb = info_to_pb(DraftInfo("eagle", 0, "", TreeLimits(), 1, "1", FeatureRequest((1,), 8)))
    change(pb.features)
    with pytest.raises(InvalidField) as caught:
        info_from_pb(pb)
    assert caught.value.field == field
