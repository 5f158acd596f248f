"""A model's tokens as llguidance reads them: the bytes of each.

llguidance can read tokenizer files itself, but takes the first decoder that it knows: SmolLM2's lists ByteFallback
before ByteLevel, and its tokens were then read as the characters that stand for their bytes.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.errors import NotSupported
from target_service.grammars.forced_text import ForcedText
from target_service.text.decoding.token_bytes import token_bytes
from target_service.text.tokenizer import ModelTokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer
# Bytes of forced text that are cut into tokens, and last tokens of those that may be others with what follows. Chosen:
# of 60,000 bytes every mask took 25 ms.
_MOST_FORCED, _UNSURE = 512, 4


@functools.lru_cache(maxsize=2)
def grammar_tokenizer(tokenizer: ModelTokenizer, vocabulary_size: int, end_token_ids: tuple[int, ...]) -> LLTokenizer:
    """The tokens of a tokenizer, for a model with logits for `vocabulary_size` tokens, of which the end
    tokens end an output. Takes about a second for 49,152 tokens; the last two are kept.

    Raises `NotSupported` where a token's text depends on its neighbours, or no token ends an output.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not end_token_ids:
        raise NotSupported("the model has no end token, with which structured_output ends")
    words = token_words(tokenizer, vocabulary_size, end_token_ids)
    # A string of JSON with room for n characters more allows all tokens of as many that need no escape: those of the
    # longest of these lengths that fit are allowed at once, and only the others looked at one by one. llguidance's own
    # are 10 and 30, with which a mask within a string of at most 30 characters took 235 us of 49,152 tokens, and 75
    # with 4, 8, 12, 16, 20 and 30. With 10 and 14 too, masks take a quarter of that with 14 or 15 characters left, and
    # 0.6 with 10 or 11.
    lengths = ("{1,4}", "{1,8}", "{1,10}", "{1,12}", "{1,14}", "{1,16}", "{1,20}", "{1,30}", "+")
    unescaped, whitespace = r'[^"\\\x00-\x1F\x7F]', r"[\x20\x0A\x0D\x09]+"
    slices = [whitespace, *[unescaped + length for length in lengths]]
    return LLTokenizer(TokenizerWrapper(words), n_vocab=vocabulary_size, eos_token=list(end_token_ids), slices=slices)


def warm_up(tokenizer: ModelTokenizer, vocabulary_size: int, end_token_ids: tuple[int, ...]) -> None:
    """Do what the first form of output would wait for, and all that shares its process with it: for 49,152 tokens no
    other thread runs for a third of a second. Does nothing for a model without forms of output."""
    with contextlib.suppress(NotSupported, ImportError):
        grammar_tokenizer(tokenizer, vocabulary_size, end_token_ids)


@functools.lru_cache(maxsize=2)
def token_words(tokenizer: ModelTokenizer, vocabulary_size: int, end_token_ids: tuple[int, ...]) -> TokenWords:
    """The bytes of every token. Raises what `grammar_tokenizer` does."""
    return TokenWords(tokenizer, vocabulary_size, end_token_ids)


class TokenWords:
    """The bytes of every token, in the shape that llguidance asks for. A special token has no text, so no form allows
    it; ids without a token have no bytes."""

    bos_token_id = None

    def __init__(self, tokenizer: ModelTokenizer, vocabulary_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids | set(end_token_ids)
        table = token_bytes(tokenizer.backend, special)
        if table is None:
            raise NotSupported("the model's tokens do not each stand for fixed bytes, which structured_output needs")
        known = table.middle
        self.eos_token_id = end_token_ids[0]
        self.special_token_ids = sorted(token for token in special if token < vocabulary_size)
        self.tokens = [known.get(token, b"") for token in range(vocabulary_size)]
        for token in self.special_token_ids:
            # A name, for messages alone.
            self.tokens[token] = b"<%d>" % token
        self._known = known
        # Of several tokens with the same bytes the last: those that stand for single bytes come first.
        self._by_bytes = {known[token]: token for token in sorted(known) if known[token] and token < vocabulary_size}
        self._longest = max(map(len, self._by_bytes), default=1)
        # The same texts are cut again and again: of a form that is asked for often, and for every mask within them.
        # Texts whose tokens are kept, of up to as many bytes. Chosen.
        self._cut = functools.lru_cache(4096)(self._tokens)
        self.forced = ForcedText(self.tokens, frozenset(special), self)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that begin a text which a form forces: all of a short one. Called for every mask where text is forced,
        with all of it that is left."""
        if len(text) <= _MOST_FORCED:
            return list(self._cut(text))
        end = _MOST_FORCED
        while end and text[end] & 0xC0 == 0x80:
            # Not inside a character.
            end -= 1
        return self._cut(text[:end])[:-_UNSURE]

    def _tokens(self, text: bytes) -> list[int]:
        """The text as the tokenizer cuts it. What it cannot give back as it stands (the beginning of a character, the
        text of a special token, text that gets a space in front) is cut greedily."""
        try:
            token_ids = self._tokenizer.encode(text.decode())
        except UnicodeDecodeError:
            return self._greedy(text)
        joined = b"".join([self._known.get(token, b"") for token in token_ids])
        return token_ids if joined == text else self._greedy(text)

    def marked(self, text: bytes) -> list[int]:
        """A text in which names of special tokens are those tokens, by any tokens."""
        special = {name: token for token in self.special_token_ids if (name := self._tokenizer.name(token))}
        # A group keeps what it splits by; the longest come first.
        names = b"|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        parts = re.split(b"(" + names + b")", text) if names else [text]
        return [token for part in parts for token in ([special[part]] if part in special else self._greedy(part))]

    def _greedy(self, text: bytes) -> list[int]:
        token_ids, start = list[int](), 0
        while start < len(text):
            for length in range(min(self._longest, len(text) - start), 0, -1):
                token = self._by_bytes.get(text[start : start + length])
                if token is not None:
                    token_ids.append(token)
                    start += length
                    break
            else:
                # No token has this byte.
                break
        return token_ids
