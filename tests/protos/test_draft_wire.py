"""Frames of the draft protocol: equal after a round trip, refused when malformed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import InvalidField, StepSkipped
from outrider.sampling import SamplingParams, VerificationMode
from outrider.tree import DraftDistribution
from outrider.v1 import draft_pb2, tree_pb2
from outrider.wire.drafts import (
    MAX_NODE_ID,
    advance_from_pb,
    advance_to_pb,
    failure_to_pb,
    growth_from_pb,
    growth_to_pb,
    info_from_pb,
    info_to_pb,
    open_from_pb,
    open_to_pb,
)
from outrider.wire.frames import MAX_NODES, DraftInfo, OpenSequence, SequenceAdvance, SequenceGrowth, TreeLimits
from outrider.wire.trees import error_of

VOCABULARY = 100
OPEN = OpenSequence(
    sequence_id=2**64 - 1,
    token_ids=(1, 2, 3),
    prompt_length=2,
    step=2**40,
    seed=2**64 - 1,
    mode=VerificationMode.COUPLED,
    sampling=SamplingParams(temperature=0.7, stop=("x",), seed=3),
    limits=TreeLimits(63, 8),
    vocabulary_size=VOCABULARY,
    tenant="acme",
    corpus="docs",
    traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
)
GROWTH = SequenceGrowth(
    sequence_id=7,
    base_step=3,
    first_node_id=5,
    parent_ids=(0, 5, 3, 6),
    token_ids=(9, 8, 7, 6),
    scores=(0.5, 0.25, 1.0, 0.0),
    distributions={0: DraftDistribution((9, 1), (3, 1)), 5: DraftDistribution((8,), (65535,))},
    replaces=True,
)


def refused(field: str, convert: Any, *arguments: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        convert(*arguments)
    assert caught.value.field == field


def test_frames_come_back_equal() -> None:
    assert open_from_pb(draft_pb2.OpenSequence.FromString(open_to_pb(OPEN).SerializeToString()), 1024) == OPEN
    advance = SequenceAdvance(3, 4, (1, 2, 99))
    assert advance_from_pb(advance_to_pb(advance), VOCABULARY) == advance
    wire = growth_to_pb(GROWTH).SerializeToString()
    assert growth_from_pb(draft_pb2.SequenceGrowth.FromString(wire), VOCABULARY) == GROWTH
    info = DraftInfo("trie", 49152, "ab" * 32, TreeLimits(63, 16), 8192, "0.1.0")
    assert info_from_pb(info_to_pb(info)) == info
    # Targets of before larger trees refuse a draft that says more.
    assert info_to_pb(replace(info, limits=TreeLimits(1007, 16))).limits.max_nodes == 255


def test_an_empty_growth_is_an_answer() -> None:
    empty = SequenceGrowth(1, 2, 1, (), (), (), replaces=True)
    assert growth_from_pb(growth_to_pb(empty), VOCABULARY) == empty


def test_a_failure_keeps_its_reason() -> None:
    pb = failure_to_pb(9, StepSkipped("a step is missing", step=3))
    error = error_of(pb.status)
    assert (pb.sequence_id, error.reason, error.message) == (9, "STEP_SKIPPED", "a step is missing")


def test_an_open_without_a_mode_takes_it_from_the_temperature() -> None:
    pb = open_to_pb(OPEN)
    pb.mode = tree_pb2.VERIFICATION_MODE_UNSPECIFIED
    assert open_from_pb(pb, 1024).mode is VerificationMode.COUPLED
    pb.sampling.temperature = 0
    assert open_from_pb(pb, 1024).mode is VerificationMode.GREEDY


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "open.token_ids"),
        ({"token_ids": [1, 2**32 - 1]}, "open.token_ids[1]"),
        ({"token_ids": [VOCABULARY, 1]}, "open.token_ids[0]"),
        ({"prompt_length": 0}, "open.prompt_length"),
        ({"prompt_length": 4}, "open.prompt_length"),
        ({"vocabulary_size": 0}, "open.vocabulary_size"),
        ({"tenant": "a/b"}, "open.tenant"),
        ({"corpus": "../up"}, "open.corpus"),
        ({"mode": 17}, "open.mode"),
        ({"mode": tree_pb2.VERIFICATION_MODE_TYPICAL}, "open.mode"),
        ({"limits": draft_pb2.TreeLimits(max_nodes=1024)}, "open.limits.max_nodes"),
        ({"traceparent": "0" * 129}, "open.traceparent"),
        ({"sampling": tree_pb2.SamplingParameters(temperature=math.nan)}, "open.sampling.temperature"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40].replace("\n", " "),
)
def test_a_bad_open_is_named(fields: dict[str, Any], field: str) -> None:
    pb = open_to_pb(OPEN)
    for name in fields:
        pb.ClearField(name)
    pb.MergeFrom(draft_pb2.OpenSequence(**fields))
    refused(field, lambda bad: open_from_pb(bad, 1024), pb)


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [([], "advance.token_ids"), ([1, 100], "advance.token_ids[1]"), ([1] * 257, "advance.token_ids")],
    ids=["empty", "out of range", "oversize"],
)
def test_a_bad_advance_is_named(token_ids: list[int], field: str) -> None:
    pb = draft_pb2.SequenceAdvance(sequence_id=1, step=1, token_ids=token_ids)
    refused(field, advance_from_pb, pb, VOCABULARY)


def growth(**fields: Any) -> draft_pb2.SequenceGrowth:
    whole = {"first_node_id": 5, "parent_ids": [0, 5], "token_ids": [1, 2], "scores": [0.5, 0.5]}
    return draft_pb2.SequenceGrowth(**(whole | fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": [1, 100]}, "growth.token_ids[1]"),
        ({"token_ids": [1, 2**32 - 1]}, "growth.token_ids[1]"),
        ({"token_ids": [1]}, "growth.parent_ids"),
        ({"parent_ids": [0]}, "growth.parent_ids"),
        ({"scores": [0.5]}, "growth.scores"),
        ({"scores": []}, "growth.scores"),
        ({"scores": [0.5, math.nan]}, "growth.scores[1]"),
        ({"scores": [-0.5, 0.5]}, "growth.scores[0]"),
        ({"scores": [math.inf, 0.5]}, "growth.scores[0]"),
        ({"parent_ids": [0, 6]}, "growth.parent_ids[1]"),
        ({"parent_ids": [5, 5]}, "growth.parent_ids[0]"),
        ({"first_node_id": 0}, "growth.first_node_id"),
        ({"first_node_id": MAX_NODE_ID}, "growth.first_node_id"),
        ({name: [0] * (MAX_NODES + 1) for name in ("parent_ids", "token_ids", "scores")}, "growth.token_ids"),
        (
            {"distributions": [tree_pb2.DraftDistribution(parent=7, token_ids=[1], weights=[1])]},
            "growth.distributions",
        ),
        (
            {"distributions": [tree_pb2.DraftDistribution(parent=0, token_ids=[100], weights=[1])]},
            "growth.distributions[0].token_ids[0]",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60].replace("\n", " "),
)
def test_a_bad_growth_is_named(fields: dict[str, Any], field: str) -> None:
    refused(field, growth_from_pb, growth(**fields), VOCABULARY)
