"""States of JSON forms: texts of one state are followed by what llguidance itself allows behind each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from random_schemas import random_schemas
from structured_forms import VOCABULARY, trained_tokenizer

from outrider.structured_output import StructuredOutput
from target_service.grammars.compiling import grammar_of
from target_service.grammars.json_states import JsonState, JsonStates, plain_length
from target_service.grammars.vocabulary import grammar_tokenizer, token_words

END = 2
_CLOSING = tuple('"}]@.')
_MOST_WILD, _MOST = 60, 300
# Where strings are bounded and not, values repeat, and several schemas can hold.
OWN: Sequence[dict[str, Any]] = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "string", "minLength": 3},
     "c": {"type": "string"}, "d": {"type": "integer"}}, "required": ["a", "b", "c", "d"]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}},
    {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
    {"$defs": {"n": {"type": "object", "properties": {"v": {"type": "string"}, "n": {"anyOf": [{"$ref": "#/$defs/n"},
     {"type": "null"}]}}, "required": ["v", "n"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
    {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "maxLength": 4}, {"type": "null"}]},
    {"type": ["object", "string"], "additionalProperties": {"type": ["string", "null"], "minLength": 2}},
)  # fmt: skip


def compare(schema: dict[str, Any], outputs: int, *, free_whitespace: bool) -> int:
    """Draw outputs, and compare the masks of the texts of each state. Returns how many were of a state met before."""
    form = StructuredOutput(json_schema=json.dumps(schema), free_whitespace=free_whitespace)
    key = trained_tokenizer(), VOCABULARY, (END,)
    tokens, states = token_words(*key).tokens, JsonStates(schema)
    closing = {token for text, token in trained_tokenizer().get_vocab().items() if text.startswith(_CLOSING)} | {END}
    beginning = LLMatcher(grammar_tokenizer(*key), grammar_of(form), log_level=0)
    known: dict[tuple[JsonState, int | None], bytes] = {}
    again = 0
    for seed in range(outputs):
        matcher, dice, last = beginning.deep_copy(), random.Random(seed), -1
        state: JsonState | None = JsonState()
        for count in range(_MOST):
            assert state is not None
            name, mask = (state, last if matcher.compute_ff_bytes() else None), matcher.compute_bitmask()
            again += name in known
            assert known.setdefault(name, mask) == mask, state
            options = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
            short = [token for token in options if token in closing]
            last = dice.choice(short if short and (count > _MOST_WILD or dice.random() < 0.3) else options)
            if last == END:
                break
            assert matcher.consume_token(last)
            state = states.behind(state, tokens[last])
    return again


@pytest.mark.parametrize("free_whitespace", [False, True])
def test_texts_of_one_state_are_followed_by_the_same(free_whitespace: bool) -> None:
    # 330 of them with six outputs each were compared too.
    for schema in random_schemas(60):
        compare(schema, 2, free_whitespace=free_whitespace)
    assert all(compare(schema, 16, free_whitespace=free_whitespace) > 50 for schema in OWN)


def state_of(schema: dict[str, Any], text: str) -> JsonState:
    state = JsonStates(schema).behind(JsonState(), text.encode())
    assert state is not None
    return state


def same(schema: dict[str, Any], one: str, other: str) -> bool:
    # Of one reading of the schema: states name its parts.
    states = JsonStates(schema)
    found = [states.behind(JsonState(), text.encode()) for text in (one, other)]
    assert None not in found
    return found[0] == found[1]


BOUNDED = {"type": "string", "maxLength": 9}
OF_TWO = {"type": "object", "properties": {"a": BOUNDED, "b": {"type": "array", "items": BOUNDED}}}


@pytest.mark.parametrize(
    ("schema", "one", "other", "are_same"),
    [
        (BOUNDED, '"abc', '"xé🙂', True),
        (BOUNDED, '"abc', '"ab', False),
        (BOUNDED, '"a\\n', '"ab', True),
        (BOUNDED, '"a\\', '"b\\', True),
        # Of the digits of an escape every one counts.
        (BOUNDED, '"a\\u00', '"b\\u01', False),
        ({"type": "string"}, '"abc', '"', True),
        ({"type": "string", "minLength": 2}, '"a', '"ab', False),
        ({"type": "string", "minLength": 2}, '"ab', '"abc', True),
        ({"type": "string", "pattern": "^a*$"}, '"a', '"aa', False),
        ({"enum": ["a", "b"]}, '"a', '"b', False),
        (OF_TWO, '{"a":"x","b', '{"a":"yz","b', True),
        (OF_TWO, '{"a":"x","b', '{"b', False),
        (OF_TWO, '{"a":"x"', '{"a":"x', False),
        # Their number is not bounded.
        (OF_TWO, '{"b":["x","', '{"b":["x","yz","', True),
        ({"type": "array", "maxItems": 3}, "[1,", "[1,2,", False),
        ({"type": "array", "maxItems": 3}, "[1,", "[2,", True),
        ({"anyOf": [BOUNDED, {"type": "null"}]}, '"ab', '"xy', True),
        # What stands in one of several objects tells which it is.
        ({"anyOf": [OF_TWO, {"type": "object"}]}, '{"a":"x",', '{"a":"y",', False),
        # Nothing is known of what a keyword means that is not known.
        ({"type": "string", "x-other": 1}, '"ab', '"xy', False),
        ({"allOf": [OF_TWO]}, '{"a":"x",', '{"a":"y",', False),
        ({"$ref": "#/$defs/none"}, '"ab', '"xy', False),
    ],
)
def test_which_texts_have_one_state(schema: dict[str, Any], one: str, other: str, are_same: bool) -> None:
    assert same(schema, one, other) == are_same


@pytest.mark.parametrize("text", ["a", " né", "🙂🙃", "a\tb", 'a"', "\\", "\x7f", ""])
def test_plain_text_is_as_long_as_the_characters_that_are_counted(text: str) -> None:
    states, length = JsonStates(BOUNDED), plain_length(text.encode())
    within = states.behind(JsonState(), b'"')
    assert within is not None and within.counts_characters()
    behind = states.behind(within, text.encode())
    if length is None:
        assert behind is None or not behind.counts_characters() or not text
    else:
        assert behind is not None and (behind.characters, behind.counts_characters()) == (length, True)
    assert (length is None) == (text in ("a\tb", 'a"', "\\", ""))
    # The beginning of a character.
    assert plain_length("é".encode()[:1]) is None


def test_a_recursive_schema_has_states_of_its_own_at_each_level() -> None:
    schema = OWN[3]
    assert same(schema, '{"v":"a","n":{"v":"', '{"v":"b","n":{"v":"cd')
    assert not same(schema, '{"v":"a', '{"v":"a","n":{"v":"a')


@pytest.mark.parametrize(
    "text", ['{"a":1}x', "{1", '{"a",', "[}", '"a\n', '{"a":1,}', "]", '"é'.encode()[:2].decode("latin") + '"']
)
def test_what_is_no_json_has_no_state(text: str) -> None:
    assert JsonStates({"type": ["object", "array", "string"]}).behind(JsonState(), text.encode("latin")) is None


def test_a_state_of_much_text_is_not_short() -> None:
    pattern = {"type": "string", "pattern": "^a*$"}
    assert state_of(pattern, '"' + "a" * 60).is_short() and not state_of(pattern, '"' + "a" * 70).is_short()
    assert state_of({"type": "string"}, '"' + "a" * 700).is_short()
    named = {"type": "object"}
    assert not state_of(named, '{"' + "a" * 1100 + '":').is_short()
