"""The text of each token by itself, as bytes: what its tokenizer's decoder makes of it in the middle of a text.

The `tokenizers` library decodes whole sequences in some 10 µs. In nearly all vocabularies a token stands for the same
bytes wherever it is, but for the beginning of a text, so a table and an incremental UTF-8 decoder do the same: for
characters whose bytes are spread over tokens, over steps, and over the border between prompt and answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
# What the cleanup of a WordPiece decoder replaces, token by token, in this order (`tokenizers`, decoders/wordpiece.rs).
_WORDPIECE_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip

Part = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """`middle` has the bytes of each token behind other text; a token without an entry has no text. `starts_alike` says
    that the beginning of a text is no different, and `single_bytes` that some tokens are a byte each."""

    middle: Mapping[int, bytes]
    starts_alike: bool
    single_bytes: bool = False


def token_bytes(tokenizer: Tokenizer, hidden: frozenset[int]) -> TokenBytes | None:
    """The table of a tokenizer, without the tokens in `hidden`. None where a token's text may depend on its neighbours:
    the decoder is of another kind, or the table is not what the library decodes."""
    tokens = {token_id: text for text, token_id in tokenizer.get_vocab().items() if token_id not in hidden}
    decoder = tokenizer.decoder
    parts = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
    if parts and parts[-1]["type"] == "ByteLevel":
        characters = byte_characters()
        if not _finds_nothing(parts[:-1], tokens.values(), characters):
            return None
        found = TokenBytes({each: _byte_level(text, characters) for each, text in tokens.items()}, starts_alike=True)
    else:
        made = _pieces(parts)
        if made is None:
            return None
        convert, fallback, starts_alike = made
        middle = {each: _piece(text, convert, fallback=fallback) for each, text in tokens.items()}
        found = TokenBytes(middle, starts_alike, single_bytes=fallback)
    return found if _agrees(tokenizer, found) else None


def byte_characters() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _flat(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a decoder, in order."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for each in decoder["decoders"] for part in _flat(each)]


def _finds_nothing(parts: Iterable[Mapping[str, Any]], tokens: Iterable[str], characters: Mapping[str, int]) -> bool:
    """Whether these parts, in front of a byte-level decoder, change none of the tokens.

    A vocabulary converted from GGUF comes with decoders that were made for vocabularies of other kinds. They look for
    whole tokens such as `<0x0A>`, and for characters that stand for no byte.
    """
    parts = list(parts)
    for part in parts:
        pattern = part.get("pattern", {}).get("String", "") if part["type"] == "Replace" else ""
        if part["type"] not in ("ByteFallback", "Fuse") and characters.keys() >= set(pattern):
            return False
    return not parts or all(characters.keys() >= set(text) and not _BYTE_TOKEN.fullmatch(text) for text in tokens)


def _byte_level(text: str, characters: Mapping[str, int]) -> bytes:
    """The bytes of a token. An added token with characters that stand for no byte is encoded as UTF-8."""
    try:
        return bytes([characters[character] for character in text])
    except KeyError:
        return text.encode()


def _pieces(parts: Iterable[Mapping[str, Any]]) -> tuple[Part, bool, bool] | None:
    """What the parts of a decoder make of a token in the middle of a text; whether `<0x0A>` stands for a byte; and
    whether the beginning of a text is no different. None for parts that need neighbours."""
    steps: list[Part] = []
    fallback = fused = False
    starts_alike = True
    parts = list(parts)
    if not parts:
        # Without a decoder the library joins tokens with spaces.
        return lambda text: " " + text, False, False
    for part in parts:
        kind = part["type"]
        if kind == "Replace" and "String" in part["pattern"]:
            old, fresh = part["pattern"]["String"], part["content"]
            if fused and len(old) != 1:
                return None
            steps.append(lambda text, old=old, fresh=fresh: text.replace(old, fresh))  # type: ignore[misc]
        elif kind == "Metaspace":
            steps.append(lambda text, mark=part["replacement"]: text.replace(mark, " "))  # type: ignore[misc]
            starts_alike = starts_alike and part.get("prepend_scheme") == "never"
        elif kind == "Strip" and fused and not part["stop"]:
            # Of the whole text, so of its beginning.
            starts_alike = starts_alike and not part["start"]
        elif kind == "WordPiece" and len(parts) == 1:
            return _word_piece(part["prefix"], cleanup=part["cleanup"]), False, False
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Fuse":
            fused = True
        else:
            return None
    return lambda text: _applied(steps, text), fallback, starts_alike


def _applied(steps: Iterable[Part], text: str) -> str:
    for step in steps:
        text = step(text)
    return text


def _word_piece(prefix: str, *, cleanup: bool) -> Part:
    def convert(text: str) -> str:
        text = text[len(prefix) :] if text.startswith(prefix) else " " + text
        for old, fresh in _WORDPIECE_CLEANUP if cleanup else ():
            text = text.replace(old, fresh)
        return text

    return convert


def _piece(text: str, convert: Part, *, fallback: bool) -> bytes:
    if fallback and _BYTE_TOKEN.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return convert(text).encode()


def _agrees(tokenizer: Tokenizer, table: TokenBytes) -> bool:
    """Whether the library decodes tokens, behind one that begins the text, to their entries."""

    def decoded(*token_ids: int) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))

    words = (token_id for token_id, text in table.middle.items() if text.isalnum() and text.isascii())
    # Single bytes are decoded with the bytes behind them.
    before = next((word for word in words if not _BYTE_TOKEN.fullmatch(tokenizer.id_to_token(word) or "")), None)
    if before is None:
        return False
    known = decoded(before)
    # Tokens whose table entry is compared with what the library decodes them to. Chosen; each takes some 10 µs.
    step = max(1, len(table.middle) // 256)
    for token_id in sorted(table.middle)[::step]:
        if decoded(before, token_id) != known + table.middle[token_id].decode(errors="replace"):
            return False
    return True
