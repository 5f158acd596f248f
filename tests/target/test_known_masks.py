"""Masks that outputs of one form share: they are those that a matcher of its own computes, and computed once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray
from structured_forms import VOCABULARY, trained_tokenizer

from benchmarks.shared.workload import form_schema
from outrider.structured_output import StructuredOutput
from target_service.grammars import known_masks
from target_service.grammars.compiling import Grammars, grammar_of
from target_service.grammars.following import FollowedGrammar, FollowedTree, masks_of
from target_service.grammars.row_masks import TreeRows
from target_service.grammars.vocabulary import grammar_tokenizer

END = 2
FORM = StructuredOutput(json_schema=json.dumps(form_schema()))
WORDS = -(-VOCABULARY // 32)


def new_grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def answer_of(name: str, orders: int = 5) -> list[int]:
    values = (name, 41, f"{name}@x.org", True, "France", "letter", orders)
    fields = dict(zip(form_schema()["properties"], values, strict=True))
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False)
    return [*trained_tokenizer().encode(text), END]


def alone(form: StructuredOutput, path: Sequence[int]) -> NDArray[np.int32]:
    """The mask behind tokens, by a matcher that nothing else uses."""
    # Many outputs here begin alike.
    return _alone(form, tuple(path))


@cache
def _alone(form: StructuredOutput, path: tuple[int, ...]) -> NDArray[np.int32]:
    matcher = LLMatcher(grammar_tokenizer(trained_tokenizer(), VOCABULARY, (END,)), grammar_of(form), log_level=0)
    assert matcher.consume_tokens([*path])
    return np.frombuffer(matcher.compute_bitmask(), np.int32)[:WORDS]


def fill_in(followed: FollowedGrammar, form: StructuredOutput, answer: Sequence[int], seed: int = 0) -> int:
    """Pass over an answer, by trees with its tokens and others beside them, and compare their masks. Returns of how
    many trees some masks were computed."""
    dice, length, computed = random.Random(seed), 0, 0
    room = np.full((64, WORDS), -1, np.int32)
    while length < len(answer) - 1:
        right = list(answer[length : min(len(answer) - 1, length + dice.randrange(5))])
        tokens, parents = (
            [9, *right, dice.randrange(VOCABULARY)],
            [0, *range(len(right)), dice.randrange(1 + len(right))],
        )
        tree = followed.follow(TreeRows(tokens, parents), answer[:length])
        computed += tree.rows is not None
        (masks,), _ = masks_of([tree], room)
        for row in range(1 + len(right)):
            assert (masks.words[row] == alone(form, answer[: length + row])).all(), (length, row)
        length += 1 + dice.randrange(1 + len(right))
    return computed


def test_a_mask_is_computed_once_for_all_outputs_of_a_form() -> None:
    grammars = new_grammars()
    assert fill_in(grammars.followed(FORM, "t"), FORM, answer_of("Anna")) > 5
    # Each pass over it reads other trees.
    for seed in range(6):
        fill_in(grammars.followed(FORM, "t"), FORM, answer_of("Anna"), seed)
    followed = grammars.followed(FORM, "t")
    assert fill_in(followed, FORM, answer_of("Emil"), 2) == 0
    # Its own matcher has read nothing.
    assert followed._read_to == 0
    # Another tenant may not see, by the time it takes, what this one generated.
    assert fill_in(grammars.followed(FORM, "other"), FORM, answer_of("Anna")) > 5


def test_trees_of_which_some_masks_are_known() -> None:
    grammars = new_grammars()
    for seed, name in enumerate(("Anna", "Ulrich", "É", 'a"b\\c', "\n\n", "日本語🙂", "Al")):
        fill_in(grammars.followed(FORM, "t"), FORM, answer_of(name, seed * 13), seed)


def test_several_trees_of_several_forms_in_one_pass() -> None:
    grammars = new_grammars()
    forms = [FORM, StructuredOutput(json_schema=json.dumps({"type": "array", "items": {"type": "string"}})),
             StructuredOutput(regex="[a-z]+")]  # fmt: skip
    outputs = [answer_of("Anna")[:12], trained_tokenizer().encode('["a","bc'), trained_tokenizer().encode("abc")]
    for _ in range(2):
        trees = list[FollowedTree]()
        for form, output in zip([*forms, *forms], [*outputs, *outputs], strict=True):
            trees.append(grammars.followed(form, "t").follow(TreeRows([9, *output[-2:]], [0, 0, 1]), output[:-2]))
        masks, _ = masks_of(trees, np.full((32, WORDS), -1, np.int32))
        for place, (form, output) in enumerate(zip([*forms, *forms], [*outputs, *outputs], strict=True)):
            for row in range(3):
                expected = alone(form, output[: len(output) - 2 + row])
                assert (masks[place].words[row] == expected).all()
    assert trees[0].rows is trees[1].rows is None and trees[2].rows is not None


def test_masks_that_were_forgotten_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a form with more states than are kept, and of forms that have to leave room for others."""
    monkeypatch.setattr(known_masks, "_MOST_OF_FORM", 9)
    monkeypatch.setattr(known_masks, "_MOST_BYTES", 0)
    monkeypatch.setattr(known_masks, "_MOST_BELOW", 5)
    grammars = new_grammars()
    other = StructuredOutput(json_schema=json.dumps(form_schema() | {"title": "T"}))
    # Both at once: each forgets what the other knows.
    first, second = grammars.followed(FORM, "t"), grammars.followed(other, "t")
    answer, room = answer_of("Anna"), np.full((32, WORDS), -1, np.int32)
    for length in range(len(answer) - 2):
        tree = TreeRows([9, answer[length]], [0, 0])
        masks, _ = masks_of([each.follow(tree, answer[:length]) for each in (first, second, first)[:2]], room)
        for one in masks:
            assert (one.words[0] == alone(FORM, answer[:length])).all()
            assert (one.words[1] == alone(FORM, answer[: length + 1])).all()
    store = grammars._store
    assert store is not None and len(store.masks) == 9
    held = [known.place for form in store._forms.values() for known in form._known.values()]
    # Each place is free, or of one mask.
    assert sorted([*held, *store._free]) == list(range(9))


def test_an_output_with_a_lexer_of_its_own_shares_no_masks() -> None:
    grammars = new_grammars()
    followed = grammars.followed(FORM, "t")
    fill_in(followed, FORM, answer_of("Anna"))
    own = grammars.followed(FORM, "t")
    own._leave_lexer()
    assert fill_in(own, FORM, answer_of("Anna")) > 10


def test_a_form_that_begins_behind_other_text() -> None:
    grammars = new_grammars()
    begun = b'{"name":"'
    for _ in range(2):
        followed = grammars.followed(FORM, "t")
        followed.begin_behind([7, 7], begun)
        text = trained_tokenizer().encode("An")
        output = [7, 7, *text]
        tree = followed.follow(TreeRows([9], [0]), output)
        (masks,), _ = masks_of([tree], np.full((4, WORDS), -1, np.int32))
        matcher = LLMatcher(grammar_tokenizer(trained_tokenizer(), VOCABULARY, (END,)), grammar_of(FORM), log_level=0)
        assert matcher.consume_tokens([*followed._begun, *text])
        assert (masks.words[0] == np.frombuffer(matcher.compute_bitmask(), np.int32)[:WORDS]).all()
    assert tree.rows is None
