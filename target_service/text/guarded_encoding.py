"""Encodes text in which only some special tokens are meant: those of a chat template, and not those that a message
writes about.

A message may have the text of a special token, such as `<|im_end|>`. As a token it would end the turn, and begin
another in anybody's name. So a second tokenizer has the same tokens, but special ones under names that nobody can
guess: what is meant is replaced by such a name, and everything else is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from target_service.text.encoded_beginnings import EncodedBeginnings, cutting_tokens
from target_service.text.tokenizer import ModelTokenizer

# Of added tokens that are not marked as special, those that look like it: <|user|>, also with wide bars, [INST], and
# the marks of thoughts and tools.
_MARKER = re.compile("<[|\uff5c].*[|\uff5c]>|\\[/?[A-Z_]+\\]|</?(think|tool[a-z_]*)>")


class GuardedEncoder:
    """Encodes with control tokens only where they are meant.

    Control tokens are those that are special, have a name in the model's settings, stand in its chat template, or look
    like a marker.

    Attributes:
        ids: of control tokens, by their texts.
        optional: texts of those that are not special, and stand in the template: it may look for them in messages.
    """

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        template, special = tokenizer.chat_template, tokenizer.special_ids
        added = {token.content: each for each, token in tokenizer.backend.get_added_tokens_decoder().items()}
        self.ids = {
            text: token_id
            for text, token_id in added.items()
            if text.strip() and (token_id in special or text in template or _MARKER.fullmatch(text))
        }
        self.optional = frozenset(text for text, each in self.ids.items() if each not in special and text in template)
        # The longest that begins at a place, as the library finds them.
        longest_first = sorted(self.ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ufdd0{nonce}.{token_id}\ufdd0" for text, token_id in self.ids.items()}
        self._renamed: Tokenizer | None = None
        marks = cutting_tokens(tokenizer.backend, [text for text in self.ids if text in template])
        self._beginnings = EncodedBeginnings(self._encode_meant, marks)
        # Unknown text becomes this one, wherever it stands.
        self._unknown = self.ids.get(tokenizer.special_tokens.get("unk_token", ""))

    def found(self, text: str) -> list[tuple[int, int]]:
        """Where texts of control tokens are."""
        return [match.span() for match in self._pattern.finditer(text)]

    def encode_all(self, text: str, owner: str = "") -> list[int] | None:
        """Token ids of a text of which every control token is meant, in the library's own way; None where that finds
        others than are written. What the same `owner` had encoded before is not encoded again."""
        return self._beginnings.encode(text, owner)

    def _encode_meant(self, text: str) -> list[int] | None:
        token_ids = self._tokenizer.encode(text)
        meant = [self.ids[match.group()] for match in self._pattern.finditer(text)]
        return token_ids if self._control(token_ids) == meant else None

    def encode(self, parts: list[tuple[str, bool]], *, begin: bool = False) -> list[int]:
        """Token ids of a text in parts, each with whether its control tokens are meant. With `begin`, with what stands
        before and behind a prompt. Raises `ValueError` where this tokenizer cannot be kept from finding others."""
        if self._renamed is None:
            self._renamed = _renamed(self._tokenizer.backend, self._names)
        meant: list[int] = []
        joined = []
        for text, is_meant in parts:
            if is_meant:
                meant += [self.ids[match.group()] for match in self._pattern.finditer(text)]
                text = self._pattern.sub(lambda match: self._names[match.group()], text)
            joined.append(text)
        token_ids: list[int] = self._renamed.encode("".join(joined), add_special_tokens=False).ids
        if self._control(token_ids) != meant:
            raise ValueError("its tokenizer finds special tokens in plain text")
        if begin:
            # By the same rule as for any text.
            token_ids = self._renamed.encode("".join(joined), add_special_tokens=True).ids
        return token_ids

    def _control(self, token_ids: list[int]) -> list[int]:
        ids = set(self.ids.values()) - {self._unknown}
        return [token for token in token_ids if token in ids]


def _renamed(tokenizer: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """A tokenizer with other texts for some of its tokens. Raises `ValueError` where their ids would change."""
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        if token["content"] in names:
            # Otherwise their text would be found in other ways than it is replaced.
            exact = {"normalized": False, "single_word": False, "special": True}
            token.update(exact, content=names[token["content"]])
    _rename_in_model(state["model"], names)
    renamed = Tokenizer.from_str(json.dumps(state))
    for text, name in names.items():
        if renamed.token_to_id(name) != tokenizer.token_to_id(text):
            raise ValueError("the ids of its special tokens have gaps")
    return renamed


def _rename_in_model(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens of the vocabulary, so that no text is encoded to them."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    if isinstance(merges := model.get("merges"), list):
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
        # A merge makes its token of any text that has the two halves.
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
