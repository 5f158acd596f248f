"""The models that `make test` runs have everything that those of `make test-full` have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
from models.test_families import TINY_MODELS
from recurrent_models import ALIKE, RECURRENT
from text_parts import TEXT_PARTS
from usual_models import (
    USUAL,
    USUAL_RECURRENT,
    USUAL_TEXT_PARTS,
    USUAL_WINDOWED,
    described,
    parts_of,
    parts_of_caches,
)
from windowed_models import WINDOWED

from tree_models.decoder_spec import DecoderSpec


@pytest.mark.parametrize(
    ("names", "chosen", "parts"),
    [
        (TINY_MODELS, USUAL, parts_of),
        (RECURRENT.keys() - ALIKE, USUAL_RECURRENT, parts_of_caches),
        (WINDOWED, USUAL_WINDOWED, parts_of_caches),
        (TEXT_PARTS, USUAL_TEXT_PARTS, parts_of_caches),
    ],
    ids=["all", "states", "windows", "text parts"],
)
def test_no_part_is_of_a_model_that_is_left_out(
    names: Iterable[str], chosen: Collection[str], parts: Callable[[DecoderSpec], set[tuple[Any, ...]]]
) -> None:
    """A newcomer with a value of its own belongs to the usual ones."""
    of = {name: parts(described(*TINY_MODELS[name])) for name in names}
    usual = set[Any]().union(*(of[name] for name in chosen))
    assert {name: left for name, its in of.items() if (left := its - usual)} == {}
