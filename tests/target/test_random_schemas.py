"""Texts that a grammar allows, token by token, are JSON of its schema by another validator: 330 schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest
from random_schemas import random_schemas
from structured_forms import VOCABULARY, trained_tokenizer

from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.grammars.compiling import Grammars
from target_service.grammars.following import FollowedGrammar

END, PROMPT_END = 2, 9
SCHEMAS, CHUNK = random_schemas(330), 110
# Tokens by which values come to their ends (those of addresses too), and how long an output may be until it takes no
# others.
_CLOSING = tuple('"}]@.')
_MOST_WILD, _MOST = 120, 900


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(trained_tokenizer(), VOCABULARY, (END,))


def random_output(followed: FollowedGrammar, dice: random.Random, forced: int) -> list[int]:
    """An output by tokens that are drawn from the masks, with up to `forced` at a time that the grammar forces."""
    closing = {token for text, token in trained_tokenizer().get_vocab().items() if text.startswith(_CLOSING)} | {END}
    output: list[int] = []
    while len(output) < _MOST:
        tree = followed.constrained(TokenTree((output[-1] if output else PROMPT_END,), (0,), (1.0,)), output, forced)
        masks = followed.masks(tree, output)
        assert masks.error is None
        output += tree.token_ids[1:]
        options = np.flatnonzero(np.unpackbits(masks.words[-1].view(np.uint8), bitorder="little")).tolist()
        short = [token for token in options if token in closing]
        token = dice.choice(short if short and (len(output) > _MOST_WILD or dice.random() < 0.5) else options)
        if token == END:
            return output
        output.append(token)
    raise AssertionError("it does not end")


def draw(grammars: Grammars, schemas: Sequence[dict[str, object]], first: int) -> None:
    forms = [StructuredOutput(json_schema=json.dumps(schema)) for schema in schemas]
    for place, (schema, form) in enumerate(zip(schemas, forms, strict=True), start=first):
        form.check()
        output = random_output(grammars.followed(form, "t"), random.Random(place), 8 * (place % 2))
        text = trained_tokenizer().decode(output)
        # Not `jsonschema.validate`, which takes longest for the schema itself.
        error = next(jsonschema.Draft202012Validator(schema).iter_errors(json.loads(text)), None)
        assert error is None, f"schema {place}: {text}: {error}"


@pytest.mark.parametrize("first", range(0, len(SCHEMAS), CHUNK))
def test_texts_of_allowed_tokens_validate(grammars: Grammars, first: int) -> None:
    draw(grammars, SCHEMAS[first : first + CHUNK], first)


def test_a_text_of_another_schema_is_found(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutput(json_object=True)
    monkeypatch.setattr(grammars, "followed", lambda *_, followed=grammars.followed: followed(form, "t"))
    with pytest.raises(AssertionError, match=r"schema 0: \{"):
        draw(grammars, [{"type": "array"}], 0)
