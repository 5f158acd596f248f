"""Colours of drafted and own text: exact with the texts of tokens, by words without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from outrider_client.results import Chunk, TokenText
from outrider_client.terminal import painting
from outrider_client.terminal.painting import DRAFTED_STYLE, OWN_STYLE, Painter, decoded


def texts_of(token_ids: Sequence[int]) -> dict[int, TokenText]:
    """Of tokens that are bytes, so that characters can be split between them."""
    return {token_id: TokenText(bytes([token_id]), special=False) for token_id in token_ids}


def chunk(token_ids: Sequence[int], text: str, drafted: int) -> Chunk:
    return Chunk(tuple(token_ids), text, drafted, step=0, token_texts=texts_of(token_ids))


def test_exact_with_the_texts_of_tokens() -> None:
    painter = Painter()
    assert painter.parts(chunk(b"abc", "abc", 2)) == [("a", True), ("b", True), ("c", False)]
    assert painter.parts(chunk(b"d", "d", 0)) == [("d", False)]


@pytest.mark.parametrize(
    "output",
    [
        "The bridge \u6865 was built \U0001f600 of stone \U0001f469\u200d\U0001f692. ".encode(),
        b"\x80",
        "\ufffd".encode(),
    ],
    ids=["text", "no-characters", "replacements"],
)
def test_a_long_output_takes_no_longer_for_each_token(output: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids, counts = output * (6000 // len(output)), list[int]()

    def counted(token_ids: Sequence[int], texts: Mapping[int, bytes]) -> str:
        counts.append(len(token_ids))
        return decoded(token_ids, texts)

    monkeypatch.setattr(painting, "decoded", counted)
    painter, text, shown, drafted = Painter(), token_ids.decode(errors="replace"), 0, ""
    for at in range(0, len(token_ids), 2):
        # What a target has for certain: no end that may be a part of a character.
        certain = token_ids[: at + 2].decode(errors="replace").rstrip("\ufffd")
        parts = painter.parts(chunk(token_ids[at : at + 2], certain[shown:], 2))
        drafted += "".join(part for part, by_draft in parts if by_draft)
        shown = len(certain)
    parts = painter.parts(chunk([], text[shown:], 0))
    assert drafted + "".join(part for part, _ in parts) == text
    assert 0 < sum(counts) < 100 * len(token_ids)


def test_several_steps_have_drafts() -> None:
    several = Chunk(tuple(b"abcdef"), "abcdef", 3, step=2, drafts_by_step=(1, 0, 2), token_texts=texts_of(b"abcdef"))
    assert several.drafted == (True, False, False, True, True, False)
    marked = [(letter, drafted) for letter, drafted in zip("abcdef", several.drafted, strict=True)]
    assert Painter().parts(several) == marked
    # Cut in the last step, and one that says nothing of steps.
    assert Chunk((1, 2, 3), "", 2, step=1, drafts_by_step=(1, 1)).drafted == (True, False, True)
    assert Chunk((1, 2, 3), "", 1, step=0).drafted == (True, False, False)
    assert Chunk((), "", 0, step=0).drafted == ()


def test_character_that_two_chunks_share() -> None:
    first, second = "é".encode()
    painter = Painter()
    assert painter.parts(chunk([97, first], "a", 1)) == [("a", True)]
    # Whoever completes a character is shown as its author.
    assert painter.parts(chunk([second, 98], "éb", 1)) == [("é", True), ("b", False)]


def test_character_that_stays_incomplete() -> None:
    painter = Painter()
    assert painter.parts(chunk(["é".encode()[0]], "", 1)) == []
    assert painter.parts(chunk([], "\ufffd", 0)) == [("\ufffd", False)]
    assert painter.parts(chunk(b"ab", "ab", 1)) == [("a", True), ("b", False)]


def test_held_back_text_keeps_its_colour() -> None:
    painter = Painter()
    assert painter.parts(chunk(b"ab", "", 1)) == []
    assert painter.parts(chunk(b"c", "abc", 0)) == [("a", True), ("b", False), ("c", False)]


def test_texts_of_another_answer_are_given_up() -> None:
    painter = Painter()
    assert painter.parts(chunk(b"xyz", "one two three", 2)) == [("one two", True), (" three", False)]
    assert painter.parts(chunk(b"four", " four", 4)) == [(" four", True)]


@pytest.mark.parametrize(
    ("token_ids", "text", "drafted", "parts"),
    [
        ([1, 2, 3], "one two three", 2, [("one two", True), (" three", False)]),
        ([1], "one", 0, [("one", False)]),
        ([1, 2], "one two", 2, [("one two", True)]),
        ([1, 2], "", 1, []),
        ([1, 2], "\n\n", 1, [("\n\n", True)]),
    ],
    ids=["mixed", "own", "all-drafted", "held-back", "no-word"],
)
def test_by_words(token_ids: list[int], text: str, drafted: int, parts: list[tuple[str, bool]]) -> None:
    assert Painter().parts(Chunk(tuple(token_ids), text, drafted, step=0)) == parts


def test_paint_joins_to_the_text() -> None:
    painted = Painter().paint(chunk(b"abc", "abc", 1))
    assert painted.plain == "abc"
    assert {str(span.style) for span in painted.spans} == {DRAFTED_STYLE, OWN_STYLE}
