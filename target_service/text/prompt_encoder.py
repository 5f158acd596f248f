"""Prompts as token ids: text as it stands, and conversations in the model's chat template.

Contents of messages are encoded without special tokens: those come from the template alone, unless a request asks for
another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from target_service.text.chat_template import ChatTemplate, Ending, TemplateFailed, Turn
from target_service.text.guarded_encoding import GuardedEncoder
from target_service.text.tokenizer import ModelTokenizer

# Noncharacters, which no text has a use for; they are no spaces, and have no case.
_MASKS = [chr(code) for code in range(0xFDD1, 0xFDEF)]


class PromptEncoder:
    """Encodes prompts for one model. Belongs to one thread."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._guarded = GuardedEncoder(tokenizer)
        self._sources = _telling_characters(self._guarded.ids)
        # Compiled with the first conversation, within its limits.
        self._template: ChatTemplate | None = None

    def text(self, text: str, special: bool | None = None, *, begin: bool = True) -> list[int]:
        """A text as it stands. `special` decides whether the text of a special token becomes that token; None takes
        the model's settings, which are true by default. `begin` adds what stands before and behind a
        prompt."""
        if not self._tokenizer.split_special if special is None else special:
            return self._tokenizer.encode(text, begin=begin)
        return self._guarded.encode([(text, False)], begin=begin)

    def chat(
        self,
        turns: Sequence[Turn],
        special: bool | None = None,
        most: int = 1 << 30,
        *,
        ending: Ending = Ending.ANSWER,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        owner: str = "",
    ) -> list[int]:
        """A conversation. `special` decides whether the text of a special token in a content, an argument or a tool
        becomes that token; `owner` is whose it is. Raises what `ChatTemplate.render` does."""
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_tokens)
        template, now = self._template, datetime.now()

        def render(given: _Given) -> str:
            return template.render(
                given.turns, now=now, most=most, ending=ending, arguments=given.arguments, tools=given.tools
            )

        whole = _Given(turns, arguments or {}, tools)
        plain = render(whole)
        if special or not any(source in text for text in _contents(whole) for source in self._sources):
            return self._all_meant(plain, owner)
        masked, unmask = self._masked(whole, plain, render)
        if self._guarded.found(unmask(masked)) == self._guarded.found(masked):
            # No content has any.
            return self._all_meant(plain, owner)
        try:
            return self._guarded.encode(_parts(masked, self._guarded, unmask))
        except ValueError as error:
            raise TemplateFailed(f"the contents have text of special tokens: {error}") from None

    def _all_meant(self, text: str, owner: str) -> list[int]:
        token_ids = self._guarded.encode_all(text, owner)
        return self._guarded.encode([(text, True)]) if token_ids is None else token_ids

    def _masked(self, given: _Given, plain: str, render: Callable[[_Given], str]) -> tuple[str, Callable[[str], str]]:
        """The conversation with contents in which no special token can be found, and what gives it its text back.

        Masks take the place of single characters, so that what a template does with a content (trim, upper-case,
        encode as JSON) does no more to them. Where it looks for a token that is not special, as for `</think>`, that
        one stays as it is: first in what the assistant said, then in all contents.
        """
        contents = _contents(given)
        free = [mask for mask in _MASKS if not any(mask in text for text in contents)]
        if len(free) < len(self._sources):
            raise TemplateFailed("the contents have noncharacters of Unicode")
        masks = dict(zip(sorted(self._sources), free, strict=False))
        back = {mask: source for source, mask in masks.items()}

        def unmask(text: str) -> str:
            for mask, source in back.items():
                # As it is, and as JSON may write it.
                text = text.replace(mask, source).replace(f"\\u{ord(mask):04x}", source)
            return text

        for keeps in ((), ("assistant",), None):
            kept = self._guarded.optional
            turns = [
                _mapped(turn, masks, kept if keeps is None or turn.get("role") in keeps else ()) for turn in given.turns
            ]
            try:
                others = kept if keeps is None else ()
                arguments, tools = (_mapped(each, masks, others) for each in (given.arguments, given.tools))
                masked = render(_Given(turns, arguments, tools))
            except TemplateFailed:
                # It takes the turns as they are, so it looks for what is masked.
                continue
            if unmask(masked) == plain:
                return masked, unmask
            if not kept:
                break
        raise TemplateFailed(
            "the text of a special token is changed by the model's chat template, so that nobody can tell whose it is"
        )


class _Given(NamedTuple):
    """What a caller gives to a template."""

    turns: Sequence[Turn]
    arguments: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]


def _telling_characters(texts: Mapping[str, int]) -> frozenset[str]:
    """Characters of which every control token has at least one: those that are neither letters nor digits, as far as
    possible, for these have no case."""
    found: set[str] = set()
    for text in sorted(texts, key=len):
        signs = [character for character in text if not character.isalnum() and not character.isspace()]
        if found.isdisjoint(signs or text):
            found.add((signs or text)[0])
    return frozenset(found)


def _contents(turns: Any) -> list[str]:
    """Every text of the turns that a caller wrote, names of arguments included."""
    if isinstance(turns, str):
        return [turns]
    if isinstance(turns, Mapping):
        names = [name for name in turns if not name.isidentifier()]
        return names + [text for name, value in turns.items() if name != "role" for text in _contents(value)]
    if isinstance(turns, Sequence):
        return [text for value in turns for text in _contents(value)]
    return []


def _mapped(value: Any, masks: Mapping[str, str], kept: Sequence[str] | frozenset[str]) -> Any:
    """The same with each character of `masks` replaced, but for the texts in `kept`, and for roles."""
    if isinstance(value, str):
        for text in sorted(kept, key=len, reverse=True):
            if text in value:
                return text.join(_mapped(part, masks, kept) for part in value.split(text))
        return _replaced(value, masks)
    if isinstance(value, Mapping):
        # Templates look for names that are identifiers; others are a caller's.
        names = {name: name if name.isidentifier() else _replaced(name, masks) for name in value}
        return {names[name]: each if name == "role" else _mapped(each, masks, kept) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(each, masks, kept) for each in value]
    return value


def _replaced(text: str, masks: Mapping[str, str]) -> str:
    # `str.translate` looks at every character by itself. No mask is a character that is masked.
    for character, mask in masks.items():
        text = text.replace(character, mask)
    return text


def _parts(masked: str, guarded: GuardedEncoder, unmask: Callable[[str], str]) -> list[tuple[str, bool]]:
    """A masked text in parts: control tokens, which are meant, and the text between, with its masks taken off."""
    parts, end = [], 0
    for start, stop in guarded.found(masked):
        parts += [(unmask(masked[end:start]), False), (masked[start:stop], True)]
        end = stop
    return [*parts, (unmask(masked[end:]), False)]
