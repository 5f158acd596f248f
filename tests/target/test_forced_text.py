"""What is told of tokens that a grammar forces is what llguidance's own masks allow, at every row."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray
from random_schemas import random_schemas
from structured_forms import VOCABULARY, trained_tokenizer

from outrider.structured_output import StructuredOutput
from target_service.grammars.compiling import Grammars, grammar_of
from target_service.grammars.following import FollowedGrammar, masks_of
from target_service.grammars.row_masks import TreeRows
from target_service.grammars.vocabulary import grammar_tokenizer

END = 2
# Of those of the tests that validate texts: among them are some whose forced text ends in bytes that begin a token.
SCHEMAS = range(240, 280)
_CLOSING = tuple('"}]@.')
_MOST_WILD, _MOST = 60, 300
OTHERS = (
    # Characters of several bytes, of which tokens are parts; texts that begin alike; a long one.
    StructuredOutput(json_schema=json.dumps({"enum": ["日本語の文章です", "日本酒🙂🙃", "naïveté", "naïf"]})),
    StructuredOutput(regex="(🙂🙃|日本)語(a|ab)c{3}(north|northern) (of|off)"),
    StructuredOutput(json_schema=json.dumps({"const": {"of": ["the same " * 90, 1, None, {"": "\n\t\\"}]}})),
    StructuredOutput(grammar='start: "<tool>" /[a-c]+/ ("</tool>" | "</tools>")'),
    StructuredOutput(choices=("yes indeed", "yes", "no way", "nowhere")),
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def bits(words: NDArray[np.int32]) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def masks_alone(form: StructuredOutput, dice: random.Random) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """The tokens of an output, and before each what may come, by a matcher that masks every row."""
    tokenizer = grammar_tokenizer(trained_tokenizer(), VOCABULARY, (END,))
    matcher = LLMatcher(tokenizer, grammar_of(form), log_level=0)
    closing = {token for text, token in trained_tokenizer().get_vocab().items() if text.startswith(_CLOSING)} | {END}
    for count in range(_MOST):
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: -(-VOCABULARY // 32)].copy()
        options = bits(words)
        short = [token for token in options if token in closing]
        token = dice.choice(short if short and (count > _MOST_WILD or dice.random() < 0.5) else options)
        yield token, words
        if token == END:
            return
        assert matcher.consume_token(token)


def check_passes(
    followed: FollowedGrammar, output: Sequence[int], words: Sequence[NDArray[np.int32]], dice: random.Random
) -> int:
    """Compare the masks of passes over an output, whose trees hold some of its next tokens and others beside them.
    Returns how many texts were found to be forced, of trees of which not every mask was known."""
    room = np.full((64, followed.words), -1, np.int32)
    length, known = 0, 0
    while length < len(output):
        right = output[length : length + dice.randrange(8)]
        tokens, parents, path = [9], [0], [0]
        for token in right:
            for _ in range(dice.randrange(2)):
                # A sibling that may be forbidden.
                tokens.append(dice.randrange(VOCABULARY))
                parents.append(path[-1])
            tokens.append(token)
            parents.append(path[-1])
            path.append(len(tokens) - 1)
        tree = followed.follow(TreeRows(tokens, parents), output[:length])
        (masks,), _ = masks_of([tree], room)
        assert masks.error is None
        for depth, row in enumerate(path):
            if length + depth < len(output) and (not depth or right[depth - 1] != END):
                assert bits(masks.words[row]) == bits(words[length + depth]), (length, depth)
        known += 0 if tree.rows is None else len(tree.rows.forced)
        length += 1 + dice.randrange(1 + len(right))
    return known


@pytest.mark.parametrize("first", SCHEMAS[::20])
def test_masks_of_passes_are_those_of_a_matcher_that_masks_every_row(grammars: Grammars, first: int) -> None:
    schemas = [
        StructuredOutput(json_schema=json.dumps(each)) for each in random_schemas(SCHEMAS.stop)[first : first + 20]
    ]
    known = 0
    for place, form in enumerate(chain(schemas, OTHERS), start=first):
        dice = random.Random(place)
        output, words = zip(*masks_alone(form, dice), strict=True)
        for _ in range(2):
            known += check_passes(grammars.followed(form, "t"), output, words, dice)
    assert known > 100


def test_forced_tokens_are_masked_by_no_matcher(grammars: Grammars) -> None:
    """Neither in the tree in which the text begins, nor at the roots of later ones."""
    form = StructuredOutput(regex="[ab]the quick brown fox[ab]")
    tokenizer = trained_tokenizer()
    output = [*tokenizer.encode("a"), *tokenizer.encode("the quick brown fox")]
    followed = grammars.followed(form, "t")
    room = np.zeros((1 + len(output), followed.words), np.int32)
    tree = followed.follow(TreeRows([9, *output[:3]], [0, 0, 1, 2]), [])
    masks_of([tree], room)
    assert tree.rows is not None and set(tree.rows.forced) == {1}
    forced = tree.rows.forced[1]
    assert forced == tuple(output[1 : 1 + len(forced)]) and len(forced) > 3
    later = followed.follow(TreeRows([output[2], output[3]], [0, 0]), output[:3])
    masks_of([later], room)
    assert later.rows is not None and later.rows.forced == {0: forced[2:]}
    # No copy of it was needed.
    assert later.rows.chains[0].matcher is followed._matcher
