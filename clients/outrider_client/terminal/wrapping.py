"""Breaks streamed text between words, so that a terminal does not break it inside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter

from rich.cells import get_character_cell_size

Part = tuple[str, bool]


class WordWrap:
    """Adds line breaks to a text that arrives in parts, each with a mark that stays with its characters. The output
    without the added breaks is the input. Lines have at most `width` cells, unless a single word has more. A word is
    held back until its line is known. Characters of two cells, such as those of Chinese, are separate words."""

    def __init__(self, width: Callable[[], int]) -> None:
        """`width` is called for every part, since terminals are resized."""
        self._current_width = width
        self._width = 1
        self._column = 0
        self._word: list[Part] = []
        self._word_cells = 0
        # Whether the current word began a line, and whether its last character is wide.
        self._at_start = True
        self._wide = False

    def feed(self, parts: Iterable[Part]) -> list[Part]:
        """The text that can be shown now."""
        self._width = max(1, self._current_width())
        return _joined(out for text, mark in parts for one in text for out in self._take(one, mark))

    def rest(self) -> list[Part]:
        """The text still held back, at the end of the input."""
        return _joined(self._end_word(0))

    def _take(self, character: str, mark: bool) -> Iterator[Part]:
        if character == "\n":
            yield from self._end_word(0)
            self._column, self._at_start = 0, True
            yield character, mark
        elif character in " \t":
            # The widest a tab can be: terminals move to the next multiple of eight.
            cells = 8 if character == "\t" else 1
            yield from self._end_word(cells)
            yield from self._break_before(cells, mark)
            self._column, self._at_start = self._column + cells, False
            yield character, mark
        else:
            yield from self._take_of_word(character, mark)

    def _take_of_word(self, character: str, mark: bool) -> Iterator[Part]:
        cells = get_character_cell_size(character)
        if cells == 2 or (self._wide and cells):
            yield from self._end_word(0)
            self._at_start = self._column == 0
        self._wide = cells == 2 or (self._wide and not cells)
        if self._at_start:
            self._column += cells
            yield character, mark
            return
        self._word.append((character, mark))
        self._word_cells += cells
        if self._column + self._word_cells > self._width:
            # It is too long for this line, however it ends.
            wide = self._wide
            yield from self._end_word(0)
            self._at_start, self._wide = True, wide

    def _end_word(self, after: int) -> Iterator[Part]:
        """The word that was held back, on a line with room for `after` more cells."""
        if self._word:
            yield from self._break_before(self._word_cells + after, self._word[0][1])
            self._column += self._word_cells
            yield from self._word
        self._word, self._word_cells = [], 0
        self._wide = False

    def _break_before(self, cells: int, mark: bool) -> Iterator[Part]:
        if self._column and self._column + cells > self._width:
            self._column = 0
            yield "\n", mark


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Joins parts of equal marks, since each is written with its own colour codes."""
    return [("".join(text for text, _ in run), mark) for mark, run in groupby(parts, key=itemgetter(1))]
