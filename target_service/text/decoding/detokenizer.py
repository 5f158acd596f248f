"""Decodes an answer as its tokens come, independent of how they are grouped into steps.

The text of an answer is what its tokens add to the prompt's: a space that a word brings along is kept, and a character
that the prompt began is finished. Special tokens have no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from target_service.text.decoding.token_bytes import TokenBytes

# What is shown for bytes that do not make a character.
REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded before an answer, where its text may depend on them. Chosen: a word of single
# bytes fits.
PROMPT_TOKENS = 32
# Of UTF-8, at most. Bytes before a prompt's last four change nothing in what an unfinished character at its end needs.
CHARACTER_BYTES = 4


class Detokenizer(Protocol):
    """Decodes one answer."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now."""

    def finish(self) -> str:
        """The text still held back, at the end of the output."""


def _one_for_each(error: UnicodeError) -> tuple[str, int]:
    """As the library shows bytes that make no character: one by one."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("outrider.one_for_each", _one_for_each)


class TableDetokenizer:
    """By a table of each token's bytes. It holds back at most the bytes of one character."""

    def __init__(self, tokenizer: Tokenizer, table: TokenBytes, prompt: Sequence[int], *, begins: bool) -> None:
        """`prompt` are the visible tokens at the prompt's end. `begins`: the answer begins a text."""
        self._tokenizer = tokenizer
        self._bytes = table.middle
        self._begins = begins and not table.starts_alike
        # A byte-level decoder shows one for each part of a character, one with single bytes one for each of them.
        errors = "outrider.one_for_each" if table.single_bytes else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        if not begins:
            self._decoder.decode(self._joined(prompt))
        # A character that the prompt began.
        self._of_prompt = bool(self._decoder.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        if self._begins:
            return self._first(ids)
        data = self._joined(ids)
        if not self._of_prompt or not data:
            return self._decoder.decode(data)
        text = self._decoder.decode(data)
        self._of_prompt = False
        if text.startswith(REPLACEMENT):
            # It was not finished, and the prompt's bytes are no part of the answer.
            self._decoder.reset()
            text = self._decoder.decode(data)
        return text

    def finish(self) -> str:
        # What the prompt began, and no token went on with, is no part of the answer.
        return "" if self._of_prompt else self._decoder.decode(b"", final=True)

    def _first(self, ids: Sequence[int]) -> str:
        """The text up to the first token that has some, which is another at the beginning, and of those behind it."""
        for place, token in enumerate(ids):
            if not self._bytes.get(token):
                continue
            self._begins = False
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
            if REPLACEMENT in text:
                return self.push(ids[place:])
            return text + self.push(ids[place + 1 :])
        return ""

    def _joined(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._bytes.get(token, b"") for token in ids])


class WindowDetokenizer:
    """By decoding the last tokens again with every one. It also holds back what the next token may change."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], prompt: Sequence[int]) -> None:
        """`hidden` are tokens without text; `prompt` are the visible tokens at the prompt's end."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._ids = list(prompt)
        # Tokens before `_prefix` are no longer needed; those up to `_read` are decoded.
        self._prefix, self._read = 0, len(self._ids)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push(token) for token in ids if token not in self._hidden])

    def finish(self) -> str:
        return self._take()

    def _push(self, token: int) -> str:
        self._ids.append(token)
        whole, known = self._decode(self._prefix), self._decode(self._prefix, self._read)
        uncertain = len(whole) <= len(known) or whole.endswith(REPLACEMENT)
        # A character takes at most four bytes; an output of bytes that never make one must not be held back for ever,
        # nor decoded from its start with every token.
        if uncertain and len(self._ids) - self._read < 32:
            return ""
        return self._take()

    def _take(self) -> str:
        """What the tokens from `_read` on add to those before."""
        whole, known = self._decode(self._prefix), self._decode(self._prefix, self._read)
        if not whole.startswith(known):
            # A character that the prompt began.
            known = known.rstrip(REPLACEMENT)
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(known) :]

    def _decode(self, start: int, stop: int | None = None) -> str:
        # Hidden ones are none of them.
        return str(self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=False))
