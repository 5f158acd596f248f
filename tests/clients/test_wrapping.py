"""Word wrap of streamed text: nothing is lost, no line is too long, and no word is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import get_character_cell_size

from outrider_client.terminal.wrapping import WordWrap

TEXTS = st.text(st.sampled_from("abcdefg    \n\t你好é\u0301`-😀"), max_size=120)
WIDTHS = st.integers(1, 20)


def wrapped(text: str, cuts: Sequence[int], width: int) -> str:
    """The text as shown when it comes in pieces."""
    wrap = WordWrap(lambda: width)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    out = []
    for start, stop in pairwise(places):
        out += wrap.feed([(text[start:stop], start % 2 == 0)])
    return "".join(part for part, _ in [*out, *wrap.rest()])


def cells(text: str) -> int:
    return sum(8 if one == "\t" else get_character_cell_size(one) for one in text)


def without_added_breaks(shown: str, text: str) -> str:
    """`shown` less the line breaks that `text` does not have there; what else differs stays."""
    out, place = "", 0
    for one in shown:
        if one == "\n" and text[place : place + 1] != "\n":
            continue
        out += one
        place += 1
    return out


@given(TEXTS, st.lists(st.integers(0, 200)), WIDTHS)
def test_nothing_is_lost(text: str, cuts: list[int], width: int) -> None:
    shown = wrapped(text, cuts, width)
    assert without_added_breaks(shown, text) == text


@given(TEXTS, st.lists(st.integers(0, 200)), WIDTHS)
def test_no_line_is_too_long_unless_one_word_is(text: str, cuts: list[int], width: int) -> None:
    for line in wrapped(text, cuts, width).split("\n"):
        # An accent alone takes no room, and no break before what follows it.
        seen = "".join(one for one in line if cells(one))
        assert cells(line) <= width or not re.search(r"[ \t].|.[ \t]", seen)


@given(st.lists(st.text("abcde", min_size=1, max_size=9), min_size=1), st.lists(st.integers(0, 200)))
def test_words_stay_whole(words: list[str], cuts: list[int]) -> None:
    assert wrapped(" ".join(words), cuts, 10).split() == words


@given(TEXTS, st.lists(st.integers(0, 200)), WIDTHS)
def test_how_it_is_cut_does_not_matter(text: str, cuts: list[int], width: int) -> None:
    assert wrapped(text, cuts, width) == wrapped(text, [], width)


@given(TEXTS)
def test_what_fits_is_left_alone(text: str) -> None:
    assert wrapped(text, [], 120 * 8) == text


def test_marks_stay_with_their_characters() -> None:
    wrap = WordWrap(lambda: 8)
    assert wrap.feed([("one ", True), ("tw", False)]) == [("one ", True)]
    assert wrap.feed([("o", True), (" three", False)]) == [("tw", False), ("o", True), (" \nthree", False)]
    assert wrap.rest() == []


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("one two three", 8, "one two \nthree"),
        ("    indented code(here)", 12, "    \nindented \ncode(here)"),
        ("a " + "x" * 20 + " b", 10, "a \n" + "x" * 20 + "\n b"),
        ("你好世界", 4, "你好\n世界"),
        ("你好ab", 5, "你好\nab"),
    ],
    ids=["words", "code", "long_word", "wide", "wide_and_narrow"],
)
def test_examples(text: str, width: int, shown: str) -> None:
    assert wrapped(text, [], width) == shown


def test_a_word_that_cannot_fit_is_shown_at_once() -> None:
    wrap = WordWrap(lambda: 10)
    assert wrap.feed([("abc defgh", True)]) == [("abc ", True)]
    assert wrap.feed([("ij", True)]) == [("\ndefghij", True)]
    assert wrap.feed([("kl", True)]) == [("kl", True)]
