"""Decodes tokens of a byte-level vocabulary by a table: the fast equivalent of `stopping.Detokenizer`.

The tokenizer's own `decode` takes some 10 µs, and a token needs two calls: at 32,000 tokens a second that is most of a
core. In a byte-level vocabulary each token stands for the same bytes everywhere, so a table and an incremental UTF-8
decoder suffice.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from target_service.core.stopping import Detokenizer, StopStrings

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Detokenizers:
    """Makes a detokenizer for each output of one model. `tokenizer` is a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # By whether special tokens are shown. The second table is made when it is first asked for.
        self._known = {False: token_bytes(tokenizer)}

    def new(self, stop: Sequence[str], *, special: bool = False) -> Detokenizer | ByteText:
        """One that ends its text at the first of the stop strings, and has `special` tokens in it or not."""
        if special not in self._known:
            self._known[special] = token_bytes(self._tokenizer, special=special)
        known = self._known[special]
        return Detokenizer(self._tokenizer, stop, special=special) if known is None else ByteText(known, stop)


class ByteText:
    """A `Detokenizer` by table. It holds back at most the bytes of one character and the beginning of a stop string."""

    def __init__(self, token_bytes: Mapping[int, bytes], stop: Sequence[str] = ()) -> None:
        """`token_bytes` as returned by the function of that name; an id without an entry has no text."""
        self._bytes = token_bytes
        self._stops = StopStrings(stop)
        # One by one, because the stop string that ends first counts, which several tokens at once would hide.
        self._one_by_one = bool(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now. Empty after a stop string."""
        if not self._one_by_one:
            return self._decode(ids)
        return "".join([self._stops.push(self._decode((token,))) for token in ids])

    def finish(self) -> str:
        """The text still held back, at the end of the output."""
        return self._stops.push(self._decoder.decode(b"", final=True), final=True)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join([self._bytes.get(token, b"") for token in ids]))


def token_bytes(tokenizer: Any, *, special: bool = False) -> Mapping[int, bytes] | None:
    """The bytes of each token, special tokens left out unless `special`; None where a token's text may depend on its
    neighbours."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return None
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    vocabulary = {token_id: text for text, token_id in tokenizer.get_vocab().items()}
    tokens = {token_id: text for token_id, text in vocabulary.items() if token_id not in added}
    characters = _byte_characters()
    if not _is_byte_level(json.loads(backend.decoder.__getstate__()), tokens.values(), characters):
        return None
    known = {token_id: _bytes_of(text, characters) for token_id, text in tokens.items()}
    return known | {token_id: vocabulary[token_id].encode() for token_id in added} if special else known


def _is_byte_level(decoder: Mapping[str, Any], tokens: Iterable[str], characters: Mapping[str, int]) -> bool:
    """Whether `decoder`, as JSON, only turns the characters of these tokens into bytes.

    A vocabulary converted from GGUF comes with further decoders in front, made for vocabularies of other kinds. They
    look for whole tokens such as `<0x0A>`, and for characters that stand for no byte.
    """
    if decoder["type"] == "ByteLevel":
        return True
    if decoder["type"] != "Sequence" or decoder["decoders"][-1]["type"] != "ByteLevel":
        return False
    for part in decoder["decoders"][:-1]:
        pattern = part.get("pattern", {}).get("String", "") if part["type"] == "Replace" else ""
        if part["type"] not in ("ByteFallback", "Fuse") and characters.keys() >= set(pattern):
            return False
    return all(characters.keys() >= set(token) and not _BYTE_TOKEN.fullmatch(token) for token in tokens)


def _bytes_of(text: str, characters: Mapping[str, int]) -> bytes:
    """The bytes of a token. An added token with characters that stand for no byte is encoded as UTF-8."""
    try:
        return bytes([characters[character] for character in text])
    except KeyError:
        return text.encode()


def _byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
