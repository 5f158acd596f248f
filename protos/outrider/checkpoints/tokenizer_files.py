"""Reads the vocabulary of a model folder's tokenizer: the same one for a target, its drafts and its heads.

What `tokenizer.json` says holds, as the `tokenizers` library reads it: transformers builds some tokenizers anew from
the name of their class, and then may split and join text in another way than the file does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.checkpoints.refusal import first_line

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"


class TokenizerRefused(ValueError):
    """A tokenizer cannot be read; the message has the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"its tokenizer cannot be read: {reason}")


def read_tokenizer(folder: Path, special: Collection[str] = ()) -> Tokenizer:
    """The tokenizer of a model folder, with tokens that its settings add. Tokens of the vocabulary become special ones
    by their texts. Raises `TokenizerRefused`."""
    if not (folder / TOKENIZER_FILE).is_file():
        return _converted(folder)
    backend = _from_file(folder / TOKENIZER_FILE)
    _add_missing(backend, read_object(folder / TOKENIZER_SETTINGS), special)
    return backend


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerRefused(f"{path.name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerRefused(f"{path.name} holds no object")
    return found


def text_of_token(token: Any) -> str:
    """The text of a token in a file of settings: by itself, or an object's content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    # The library raises nothing narrower.
    except Exception as error:
        raise TokenizerRefused(f"{path.name} cannot be read: {error}") from None


def _add_missing(backend: Tokenizer, settings: Mapping[str, Any], special: Collection[str]) -> None:
    """Add tokens that only the settings have. Those of the vocabulary become special tokens by their names; one that
    the settings number otherwise than it would be is refused, since the model would read another token."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    try:
        missing = sorted((int(number), entry) for number, entry in listed.items() if text_of_token(entry) not in known)
        for number, entry in missing:
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = AddedToken(text_of_token(entry), special=bool(entry.get("special")), **flags)
            _add(backend, token)
            if backend.token_to_id(token.content) != number:
                raise TokenizerRefused(
                    f"{TOKENIZER_SETTINGS} gives the token {token.content!r} the id {number}, and {TOKENIZER_FILE} "
                    f"{backend.token_to_id(token.content)}"
                )
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, TokenizerRefused):
            raise
        raise TokenizerRefused(f"{TOKENIZER_SETTINGS}: added_tokens_decoder cannot be read: {error}") from None
    for text in special:
        # One that the vocabulary lacks is none that the model could read.
        if text not in known and backend.token_to_id(text) is not None:
            _add(backend, AddedToken(text, special=True, normalized=False))


def _add(backend: Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _converted(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with files of another kind, as transformers converts them. One that loses text is
    refused: it was converted as another kind than it is."""
    from transformers import AutoTokenizer

    missing = f"there is no {TOKENIZER_FILE}"
    try:
        found = AutoTokenizer.from_pretrained(str(folder))
    # A broken file makes transformers raise anything.
    except Exception as error:
        raise TokenizerRefused(f"{missing}, and its other files cannot be read: {first_line(error)}") from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerRefused(f"{missing}, and a {type(found).__name__} cannot be converted to one")
    backend = Tokenizer.from_str(backend.to_str())
    if not (probes := _probes(backend)):
        raise TokenizerRefused(f"{missing}, and as a {type(found).__name__} its other files have no words")
    for probe in probes:
        back = backend.decode(backend.encode(probe, add_special_tokens=False).ids)
        if back.strip().lower() != probe:
            raise TokenizerRefused(
                f"{missing}, and as a {type(found).__name__} its other files turn {probe!r} into {back!r}"
            )
    return backend


def _probes(backend: Tokenizer) -> list[str]:
    """Texts of two words that the vocabulary has, so that they come back unless it was converted as another kind."""
    words = sorted(text for text in backend.get_vocab() if text.isascii() and text.isalpha() and text.islower())
    # Texts that must come back from a tokenizer that was converted from other files. Chosen.
    return [f"{first} {second}" for first, second in zip(words[::2], words[1::2], strict=False)][:8]
