"""Which part of a chunk's text was drafted, and which is the model's own, for showing them in two colours."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from outrider_client.results import Chunk

DRAFTED_STYLE = "green"
OWN_STYLE = "yellow"


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
    """Splits the text of one generation's chunks into drafted and own parts. Exact where the chunks have the texts of
    their tokens (`Speculation.token_texts`). Without them, the last word of a step's text counts as the model's own
    token."""

    def __init__(self) -> None:
        # Texts of tokens by their ids; None once some came without, or the answer's text is another.
        self._texts: dict[int, bytes] | None = {}
        # The last tokens: those up to `_read` are part of the text, and stay for what the next ones are decoded to.
        self._ids: list[int] = []
        self._read = 0
        # Text not shown yet, and behind it that of the tokens from `_read` on, whose last character may be incomplete.
        self._text = self._pending = ""
        self._shown = 0
        # Of tokens whose text is not shown yet: characters of the whole output that are complete with it, and whether
        # it was drafted.
        self._ends: deque[tuple[int, bool]] = deque()

    def paint(self, chunk: Chunk) -> Text:
        return coloured(self.parts(chunk))

    def parts(self, chunk: Chunk) -> list[tuple[str, bool]]:
        """The chunk's text in pieces, each with whether it was drafted. Joined, they are `chunk.text`."""
        if self._texts is not None and self._follow(chunk, self._texts):
            return list(self._exact(chunk.text))
        return [(part, drafted) for part, drafted in _by_words(chunk) if part]

    def _follow(self, chunk: Chunk, texts: dict[int, bytes]) -> bool:
        """Record the chunk's tokens. False, from then on, when one has no text, or another one than the answer."""
        for token_id, token in chunk.token_texts.items():
            texts[token_id] = b"" if token.special else token.text
        if not all(token_id in texts for token_id in chunk.token_ids):
            self._texts = None
            return False
        for token_id, drafted in zip(chunk.token_ids, chunk.drafted, strict=True):
            self._ends.append((self._decode(token_id, texts), drafted))
        if not self._shown and chunk.text[:1] not in ("", " "):
            self._drop_first_space()
        if not (self._text + self._pending).startswith(chunk.text):
            self._texts = None
            return False
        if len(chunk.text) > len(self._text):
            # The target does not wait for the rest of the character: the output ends.
            self._take_pending()
        self._text = self._text[len(chunk.text) :]
        return True

    def _drop_first_space(self) -> None:
        """Where an answer begins a text, its first word has no space before it."""
        if (self._text or self._pending).startswith(" "):
            self._text, self._pending = self._text[1:], self._pending if self._text else self._pending[1:]
            self._ends = deque((max(0, end - 1), drafted) for end, drafted in self._ends)

    def _decode(self, token_id: int, texts: Mapping[int, bytes]) -> int:
        """Add a token to the text. Returns how many characters of the whole output are complete with it. Decoded are
        the tokens since the character before the last: the whole output would take longer with every token."""
        self._ids.append(token_id)
        known, whole = decoded(self._ids[: self._read], texts), decoded(self._ids, texts)
        self._pending = whole[len(known) :]
        start = self._shown + len(self._text)
        waiting = not self._pending or self._pending.endswith("\ufffd")
        # As many tokens wait for a character to be complete as in the target, whose texts are compared.
        if waiting and len(self._ids) - self._read < 32:
            return max(start + len(self._pending.rstrip("\ufffd")), self._ends[-1][0] if self._ends else 0)
        self._take_pending()
        return self._shown + len(self._text)

    def _take_pending(self) -> None:
        self._text += self._pending
        self._pending = ""
        del self._ids[: self._read]
        self._read = len(self._ids)

    def _exact(self, text: str) -> Iterator[tuple[str, bool]]:
        first = start = self._shown
        self._shown += len(text)
        while self._ends and start < self._shown:
            end, drafted = self._ends[0]
            stop = min(end, self._shown)
            if stop > start:
                yield text[start - first : stop - first], drafted
                start = stop
            if end <= self._shown:
                self._ends.popleft()
        if start < self._shown:
            yield text[start - first :], False


def decoded(token_ids: Sequence[int], texts: Mapping[int, bytes]) -> str:
    """The text of tokens with these bytes."""
    return b"".join([texts[token_id] for token_id in token_ids]).decode(errors="replace")


def _by_words(chunk: Chunk) -> Iterator[tuple[str, bool]]:
    if chunk.drafted_tokens in (0, len(chunk.token_ids)):
        yield chunk.text, chunk.drafted_tokens > 0
        return
    last = re.search(r"\s*\S+\s*$", chunk.text)
    cut = last.start() if last else len(chunk.text)
    yield chunk.text[:cut], True
    yield chunk.text[cut:], False
