"""What crosses the wire comes back equal, and what is malformed is refused with the path of the field at fault."""

from __future__ import annotations

import math
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidField
from outrider.sampling import SamplingParams, TypicalAcceptance, VerificationMode
from outrider.tree import DraftDistribution, TokenTree
from outrider.v1 import tree_pb2
from outrider.wire.trees import (
    mode_from_pb,
    mode_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    tenant_from_pb,
    tree_from_pb,
    tree_to_pb,
    typical_from_pb,
    typical_to_pb,
)

VOCABULARY = 100
singles = st.floats(0, 1, width=32)


def refused(field: str, convert: Any, *arguments: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        convert(*arguments)
    assert caught.value.field == field


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 10),
        top_k=st.integers(0, 2**32 - 1),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, 5, exclude_min=True),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=5),
        min_tokens=st.integers(0, 5),
        max_tokens=st.none() | st.integers(5, 2**32 - 1),
        stop=st.lists(st.text(min_size=1, max_size=8), max_size=4).map(tuple),
        stop_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=4).map(tuple),
        ignore_eos=st.booleans(),
        seed=st.none() | st.integers(0, 2**64 - 1),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
    )
)
def test_sampling_comes_back_equal(params: SamplingParams) -> None:
    wire = sampling_to_pb(params).SerializeToString()
    assert sampling_from_pb(tree_pb2.SamplingParameters.FromString(wire), VOCABULARY) == params


def test_an_empty_message_means_the_defaults() -> None:
    assert sampling_from_pb(tree_pb2.SamplingParameters(), VOCABULARY) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": {VOCABULARY: 1.0}}, f"logit_bias[{VOCABULARY}]"),
        ({"logit_bias": {1: math.nan}}, "logit_bias[1]"),
        ({"logit_bias": {token: 0.0 for token in range(1025)}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["é" * 129]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [1, VOCABULARY]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)
def test_bad_sampling_is_named(fields: dict[str, Any], field: str) -> None:
    refused(f"sampling.{field}", sampling_from_pb, tree_pb2.SamplingParameters(**fields), VOCABULARY)


@pytest.mark.parametrize("mode", [None, *VerificationMode], ids=str)
def test_modes_come_back_equal(mode: VerificationMode | None) -> None:
    assert mode_from_pb(mode_to_pb(mode)) is mode


@pytest.mark.parametrize("number", [5, -1, 2**31 - 1])
def test_an_unknown_mode_is_refused(number: int) -> None:
    refused("open.mode", mode_from_pb, number, "open.mode")


def test_the_rule_of_typical_acceptance() -> None:
    assert typical_to_pb(None) is None
    for rule in (TypicalAcceptance(), TypicalAcceptance(0.2, 0.5)):
        pb = typical_to_pb(rule)
        assert pb is not None
        assert typical_from_pb(pb) == rule
    assert typical_from_pb(tree_pb2.TypicalAcceptance()) == TypicalAcceptance()
    assert typical_from_pb(tree_pb2.TypicalAcceptance(delta=0.5)) == TypicalAcceptance(delta=0.5)
    for value in (0.0, 1.0, math.nan):
        refused("open.typical.epsilon", typical_from_pb, tree_pb2.TypicalAcceptance(epsilon=value), "open.typical")


@pytest.mark.parametrize("tenant", ["a" * 65, "a/b", "../x", "a b", "é", "a\n", "\0"], ids=repr)
def test_a_tenant_that_could_be_a_path_is_refused(tenant: str) -> None:
    refused("open.tenant", tenant_from_pb, tenant, "open.tenant")


def test_no_tenant_is_the_default_one() -> None:
    assert tenant_from_pb("") == "default" and tenant_from_pb("Acme_1.x-y") == "Acme_1.x-y"


@given(st.data())
def test_a_tree_comes_back_equal(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 30))
    parents = [0] + [data.draw(st.integers(0, row - 1)) for row in range(1, rows)]
    tree = TokenTree(
        token_ids=tuple(range(rows)),
        parents=tuple(parents),
        scores=(1.0, *(data.draw(singles) for _ in range(1, rows))),
        distributions={0: DraftDistribution(tuple(range(1, 40)), tuple(range(1, 40)))},
    )
    wire = tree_to_pb(tree).SerializeToString()
    assert tree_from_pb(tree_pb2.TokenTree.FromString(wire), VOCABULARY) == tree


def tree_bytes(*token_varints: bytes, parents: bytes = b"\x12\x02\x00\x00") -> bytes:
    """A TokenTree as a hostile client would write it: ids as raw varints."""
    packed = b"".join(token_varints)
    return b"\x0a" + bytes([len(packed)]) + packed + parents


MINUS_ONE = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"
TWO_TO_THE_32 = b"\x80\x80\x80\x80\x10"


def test_a_raw_minus_one_is_no_token() -> None:
    pb = tree_pb2.TokenTree.FromString(tree_bytes(b"\x05", MINUS_ONE))
    refused("tree.token_ids[1]", tree_from_pb, pb, VOCABULARY)


def test_raw_bits_above_32_are_dropped_by_protobuf_and_leave_a_valid_id() -> None:
    pb = tree_pb2.TokenTree.FromString(tree_bytes(b"\x05", TWO_TO_THE_32))
    assert tree_from_pb(pb, VOCABULARY).token_ids == (5, 0)


@pytest.mark.parametrize("wire", [b"\x0a\x05\x01", b"\x0a", b"\xff" * 12, b"\x0a\x01\xff"], ids=repr)
def test_bytes_that_are_no_message_do_not_parse(wire: bytes) -> None:
    with pytest.raises(DecodeError):
        tree_pb2.TokenTree.FromString(wire)


@given(st.binary(max_size=60))
def test_random_bytes_give_a_sound_tree_or_an_error(wire: bytes) -> None:
    try:
        tree = tree_from_pb(tree_pb2.TokenTree.FromString(wire), VOCABULARY)
    except (DecodeError, InvalidField):
        return
    assert all(0 <= token < VOCABULARY for token in tree.token_ids)


def distribution(**fields: Any) -> tree_pb2.DraftDistribution:
    return tree_pb2.DraftDistribution(**({"parent": 0, "token_ids": [2, 3], "weights": [1, 1]} | fields))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "tree.token_ids"),
        ({"token_ids": [1, 100], "parents": [0, 0]}, "tree.token_ids[1]"),
        ({"token_ids": [1, 2], "parents": [0]}, "tree.parents"),
        ({"token_ids": [1, 2], "parents": [0, 0], "scores": [1.0]}, "tree.scores"),
        ({"token_ids": [1, 2], "parents": [0, 0], "scores": [1.0, math.nan]}, "tree.scores[1]"),
        ({"token_ids": [1] * 9, "parents": [0, *range(8)]}, "tree.token_ids"),
        ({"distributions": [distribution(), distribution()]}, "tree.distributions[1].parent"),
        ({"distributions": [distribution(parent=2)]}, "tree.distributions"),
        ({"distributions": [distribution(weights=[1])]}, "tree.distributions[0].weights"),
        ({"distributions": [distribution(weights=[1, 0])]}, "tree.distributions[0].weights[1]"),
        ({"distributions": [distribution(weights=[1, 65536])]}, "tree.distributions[0].weights[1]"),
        ({"distributions": [distribution(token_ids=[2, 2])]}, "tree.distributions[0].token_ids"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60].replace("\n", " "),
)
def test_a_bad_tree_is_named(fields: dict[str, Any], field: str) -> None:
    if "distributions" in fields:
        fields = {"token_ids": [1, 2], "parents": [0, 0]} | fields
    refused(field, tree_from_pb, tree_pb2.TokenTree(**fields), VOCABULARY, 8)
