"""Which part of a chunk's text was drafted, and which is the model's own, for showing them in two colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from rich.text import Text

from outrider_client.local.models import Tokenizer
from outrider_client.results import Chunk

DRAFTED_STYLE = "green"
OWN_STYLE = "yellow"
_LAST_WORD = re.compile(r"\s*\S+\s*$")
_REPLACEMENT = "\ufffd"


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(("drafted", DRAFTED_STYLE), " and accepted, ", ("the model's own", OWN_STYLE))


def coloured(parts: Iterable[tuple[str, bool]]) -> Text:
    """Text in which drafted and own parts have different colours."""
    text = Text()
    for part, drafted in parts:
        text.append(part, DRAFTED_STYLE if drafted else OWN_STYLE)
    return text


class Painter:
    """Splits the text of one generation's chunks into drafted and own parts.

    Exact with the model's tokenizer. Without one, the last word of a step's text counts as the model's own token.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
        # [i]: characters of the whole output that are complete with token i.
        self._ends: list[int] = []
        self._shown = 0

    def paint(self, chunk: Chunk) -> Text:
        """The chunk's text, coloured."""
        return coloured(self.parts(chunk))

    def parts(self, chunk: Chunk) -> list[tuple[str, bool]]:
        """The chunk's text in pieces, each with whether it was drafted. Joined, they are `chunk.text`."""
        if self._tokenizer is not None and self._follow(chunk, self._tokenizer):
            return list(self._exact(chunk.text))
        return [(part, drafted) for part, drafted in _by_words(chunk) if part]

    def _follow(self, chunk: Chunk, tokenizer: Tokenizer) -> bool:
        """Record the chunk's tokens. False, from then on, when the tokenizer is not the model's."""
        text = ""
        for token_id, drafted in zip(chunk.token_ids, chunk.drafted, strict=True):
            self._token_ids.append(token_id)
            self._drafted.append(drafted)
            text = tokenizer.decode(self._token_ids)
            before = self._ends[-1] if self._ends else 0
            self._ends.append(max(before, len(text.rstrip(_REPLACEMENT))))
        if not chunk.token_ids:
            text = tokenizer.decode(self._token_ids)
        if text[self._shown : self._shown + len(chunk.text)] != chunk.text:
            self._tokenizer = None
        return self._tokenizer is not None

    def _exact(self, text: str) -> Iterator[tuple[str, bool]]:
        start = self._shown
        self._shown += len(text)
        for end, drafted in zip(self._ends, self._drafted, strict=True):
            if end > start and start < self._shown:
                stop = min(end, self._shown)
                yield text[start - self._shown + len(text) : stop - self._shown + len(text)], drafted
                start = stop
        if start < self._shown:
            yield text[start - self._shown :], False


def _by_words(chunk: Chunk) -> Iterator[tuple[str, bool]]:
    if chunk.drafted_tokens in (0, len(chunk.token_ids)):
        yield chunk.text, chunk.drafted_tokens > 0
        return
    last = _LAST_WORD.search(chunk.text)
    cut = last.start() if last else len(chunk.text)
    yield chunk.text[:cut], True
    yield chunk.text[cut:], False
