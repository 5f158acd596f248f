"""What the operator lets prompts of all tenants share: a file of their beginnings, such as an application's system
prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outrider.settings import SettingsError

if TYPE_CHECKING:
    from target_service.text.prompt_encoder import PromptEncoder

# First letters of two questions. What the prompts before both have in common is the beginning of any question's.
_QUESTIONS = "a", "1"


class SharedPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first turns of conversations, with the tools that they have, or the first text of prompts."""

    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""


def read_shared_prompts(path: str) -> list[SharedPrompt]:
    """The entries of a file of JSON lines; none for an empty path. Raises `SettingsError` with the number of a wrong
    line."""
    if not path:
        return []
    prompts: list[SharedPrompt] = []
    try:
        for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
            if line.strip():
                prompts.append(_read_line(line, f"--shared-prompts: {path}:{number}"))
    except OSError as error:
        raise SettingsError(f"--shared-prompts: {path}: {error.strerror}") from None
    return prompts


def _read_line(line: bytes, place: str) -> SharedPrompt:
    try:
        prompt = msgspec.json.decode(line, type=SharedPrompt)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{place}: {error}") from None
    if bool(prompt.messages) == bool(prompt.text):
        raise SettingsError(f"{place}: one of messages and text is required")
    for turn in prompt.messages:
        if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            raise SettingsError(f"{place}: each message needs a role and a content, both strings")
    return prompt


def encoded_beginning(encoder: PromptEncoder, prompt: SharedPrompt) -> list[int]:
    """Token ids that every prompt with this beginning begins with. Raises `TemplateFailed`."""
    if prompt.text:
        whole = [encoder.text(prompt.text + question) for question in _QUESTIONS]
    else:
        questions = ({"role": "user", "content": question} for question in _QUESTIONS)
        whole = [encoder.chat([*prompt.messages, question], tools=prompt.tools) for question in questions]
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False))
    return [token_id for token_id, _ in alike]
