"""A model's tokenizer: by its own file, for prompts, answers, stop strings and names of tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from target_service.text.answer_format import AnswerFormat, answer_format
from target_service.text.decoding.detokenizer import (
    CHARACTER_BYTES,
    PROMPT_TOKENS,
    Detokenizer,
    TableDetokenizer,
    WindowDetokenizer,
)
from target_service.text.decoding.stop_strings import StopStrings
from target_service.text.decoding.token_bytes import TokenBytes, token_bytes

# Named special tokens that the texts of a model's files call so.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelTokenizer:
    """Text to tokens and back. Any thread may use it.

    Attributes:
        backend: of the `tokenizers` library. It neither cuts nor pads.
        chat_template: in Jinja; empty for a model without one.
        special_tokens: texts of the model's special tokens by their names, such as "bos_token".
        split_special: the text of a special token in a prompt is text, unless a request asks for another way.
        response_template: how the model marks the parts of its answers, as transformers reads it; None for a tokenizer
            that does not say.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        chat_template: str = "",
        special_tokens: Mapping[str, str] | None = None,
        split_special: bool = False,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.split_special = split_special
        self.response_template = response_template
        backend.no_truncation()
        backend.no_padding()

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens without text in an answer: those that the file marks, and those that have a name."""
        added = self.backend.get_added_tokens_decoder()
        named = set(self.special_tokens.values())
        return frozenset(each for each, token in added.items() if token.special or token.content in named)

    @cached_property
    def answer_format(self) -> AnswerFormat | None:
        """How the model marks the parts of its answers; None where they are text alone, as far as is known."""
        return answer_format(self.chat_template, self.response_template)

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return re.search(r"\btools\b", self.chat_template) is not None

    def get_vocab(self) -> dict[str, int]:
        """Every token's id, by its text."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, *, begin: bool = False) -> list[int]:
        """Token ids of a text, in which the text of a special token becomes that token. With `begin`, with what stands
        before and behind a prompt, such as a beginning token."""
        token_ids: list[int] = self.backend.encode(text, add_special_tokens=begin).ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens that begin one, without special tokens."""
        visible = [token for token in token_ids if token not in self.special_ids]
        return str(self.backend.decode(visible, skip_special_tokens=True))

    def name(self, token_id: int) -> bytes:
        """The text of one token, as it is behind other text; of a special token, that of its name. Bytes, since it may
        be a part of a character. Empty for an id that is no token's."""
        if self._table is not None and (known := self._table.middle.get(token_id)) is not None:
            return known
        text = self.backend.id_to_token(token_id)
        if text is None or token_id in self.special_ids or self._table is not None:
            return (text or "").encode()
        return str(self.backend.decode([token_id], skip_special_tokens=True)).encode()

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Decodes an answer to `prompt`, in which special tokens have no text."""
        table = self._table
        end = self._visible_end(prompt, table)
        if table is None:
            return WindowDetokenizer(self.backend, self.special_ids, end)
        begins = not end or (self._sections_begin_with_space and prompt[-1] in self.special_ids)
        return TableDetokenizer(self.backend, table, end, begins=begins)

    def answer(
        self,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        show_special: bool = False,
        shown: Collection[int] = (),
    ) -> AnswerText:
        """The text of an answer to `prompt`, up to the first of `stop`; with `show_special`, the same text with the
        names of its special tokens in it, and with `shown` those of these."""
        special = self._special_by_length if stop or show_special or shown else ()
        visible = self.special_ids if show_special else shown
        return AnswerText(self.detokenizer(prompt), StopStrings(stop, special, shown=visible))

    def special_in(self, answer_format: AnswerFormat) -> frozenset[int]:
        """Special tokens that mark parts of answers."""
        return frozenset(token for name, token in self._special_by_length if answer_format.mentions(name))

    @cached_property
    def _special_by_length(self) -> tuple[tuple[str, int], ...]:
        names = [(self.backend.id_to_token(token_id) or "", token_id) for token_id in self.special_ids]
        return tuple(sorted((pair for pair in names if pair[0]), key=lambda pair: -len(pair[0])))

    @cached_property
    def _table(self) -> TokenBytes | None:
        return token_bytes(self.backend, self.special_ids)

    @cached_property
    def _sections_begin_with_space(self) -> bool:
        """Whether encoding puts a space before text that follows a special token, as SentencePiece does, so that an
        answer's first space there is none of its own."""
        if self._table is None or self._table.starts_alike:
            return False
        for token_id in self.special_ids:
            ids = self.encode((self.backend.id_to_token(token_id) or "") + "a")
            if len(ids) > 1 and ids[0] == token_id and not self._is_word_piece:
                return self._table.middle.get(ids[1], b"").startswith(b" ")
        return False

    @property
    def _is_word_piece(self) -> bool:
        # Its decoder puts a space before every word, whatever the encoding found there.
        return self.backend.decoder is None or type(self.backend.decoder).__name__ == "WordPiece"

    def _visible_end(self, prompt: Sequence[int], table: TokenBytes | None) -> list[int]:
        """The last tokens of a prompt that have text; with a `table` of their bytes no more than a character takes."""
        end, size = list[int](), 0
        for token in reversed(prompt):
            if len(end) == PROMPT_TOKENS or size >= CHARACTER_BYTES:
                break
            if token not in self.special_ids and self.backend.id_to_token(token) is not None:
                end.append(token)
                size += 0 if table is None else len(table.middle.get(token, b""))
        return end[::-1]


class AnswerText:
    """The text of one answer: decoded as it comes, and cut at the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now. Empty after a stop string."""
        if not self._stops:
            return self._detokenizer.push(ids)
        # One by one, because the stop string that ends first counts, which several tokens at once would hide.
        return "".join([self._stops.push(self._decoded(token)) for token in ids])

    def finish(self) -> str:
        """The text still held back, at the end of the output."""
        return self._stops.push(self._detokenizer.finish(), final=True)

    def _decoded(self, token: int) -> str:
        return self._stops.mark(token) or self._detokenizer.push((token,))
