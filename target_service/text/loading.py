"""Reads the tokenizer of a model folder.

What `tokenizer.json` says holds, as the `tokenizers` library reads it: transformers builds some tokenizers anew from
the name of their class, and then may split and join text in another way than the file does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from target_service.text.tokenizer import SPECIAL_NAMES, ModelTokenizer

log = logging.getLogger(__name__)

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OLDER_NAMES = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_OLDER_TEMPLATE = "chat_template.json"
_MORE_TEMPLATES = "additional_chat_templates"
# Which of several named templates is for conversations without tools, and which for those with them.
_DEFAULT_TEMPLATE = "default"
_TOOL_TEMPLATE = "tool_use"
# Texts that must come back from a tokenizer that was converted from other files. Chosen.
_MOST_PROBES = 8


class TokenizerRefused(ValueError):
    """A tokenizer cannot be read; the message has the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"its tokenizer cannot be read: {reason}")


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model folder. Raises `TokenizerRefused`."""
    settings = _json(folder / _SETTINGS)
    names = {**_json(folder / _OLDER_NAMES), **settings}
    special = {name: text for name in SPECIAL_NAMES if (text := _text(names.get(name)))}
    if (folder / _FILE).is_file():
        backend = _from_file(folder / _FILE)
        _add_missing(backend, settings, special)
        _settle_begin_and_end(backend, settings, special)
        _compare_prefix_space(backend, settings)
    else:
        backend = _converted(folder)
    split = settings.get("split_special_tokens") is True
    return ModelTokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        split_special=split,
        response_template=_response_template(settings),
    )


def tokenizer_of(converted: Any) -> ModelTokenizer:
    """The same of a fast tokenizer of transformers that is loaded already."""
    special = {name: str(text) for name in SPECIAL_NAMES if (text := getattr(converted, name, None))}
    backend = Tokenizer.from_str(converted.backend_tokenizer.to_str())
    return ModelTokenizer(
        backend,
        chat_template=converted.chat_template or "",
        special_tokens=special,
        response_template=getattr(converted, "response_template", None),
    )


def _json(path: Path) -> dict[str, Any]:
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


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    # The library raises nothing narrower.
    except Exception as error:
        raise TokenizerRefused(f"{path.name} cannot be read: {error}") from None


def _text(token: Any) -> str:
    """The text of a token in a file of settings: by itself, or an object's content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _add_missing(backend: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add tokens that only the settings have. Those of the vocabulary become special tokens by their names; one that
    the settings number otherwise than it would be is refused, since the model would read another token."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    try:
        missing = sorted((int(number), entry) for number, entry in listed.items() if _text(entry) not in known)
        for number, entry in missing:
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            token = AddedToken(_text(entry), special=bool(entry.get("special")), **flags)
            _add(backend, token)
            if backend.token_to_id(token.content) != number:
                raise TokenizerRefused(
                    f"{_SETTINGS} gives the token {token.content!r} the id {number}, and {_FILE} "
                    f"{backend.token_to_id(token.content)}"
                )
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, TokenizerRefused):
            raise
        raise TokenizerRefused(f"{_SETTINGS}: added_tokens_decoder cannot be read: {error}") from None
    for text in special.values():
        # One that the vocabulary lacks is none that the model could read.
        if text not in known and backend.token_to_id(text) is not None:
            _add(backend, AddedToken(text, special=True, normalized=False))


def _add(backend: Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _settle_begin_and_end(backend: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Have prompts begin and end with the tokens that the settings name explicitly, where the file has it otherwise:
    some files leave it to their settings."""
    inner = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    start = next((i for i in range(len(whole) - len(inner) + 1) if whole[i : i + len(inner)] == inner), 0)
    ends = {"bos": whole[:start], "eos": whole[start + len(inner) :]}
    changed = False
    for name, found in ends.items():
        wanted, text = settings.get(f"add_{name}_token"), special.get(f"{name}_token", "")
        token_id = backend.token_to_id(text) if text else None
        if not isinstance(wanted, bool) or token_id is None or wanted == (token_id in found):
            continue
        ends[name] = [token_id] if wanted else []
        changed = True
    if changed:
        names = {token_id: backend.id_to_token(token_id) for token_id in (*ends["bos"], *ends["eos"])}
        pieces = [*(names[each] for each in ends["bos"]), "$A", *(names[each] for each in ends["eos"])]
        backend.post_processor = TemplateProcessing(
            single=pieces, pair=None, special_tokens=[(text, token_id) for token_id, text in names.items()]
        )
        log.info("prompts begin and end as %s says, and not as %s does", _SETTINGS, _FILE)


def _compare_prefix_space(backend: Tokenizer, settings: Mapping[str, Any]) -> None:
    wanted, parts = settings.get("add_prefix_space"), backend.pre_tokenizer
    if not isinstance(wanted, bool) or parts is None:
        return
    state = json.loads(parts.__getstate__())
    found = state.get("add_prefix_space", {"never": False}.get(state.get("prepend_scheme", ""), wanted))
    if found != wanted:
        log.warning("%s says add_prefix_space %s, and %s otherwise: the latter holds", _SETTINGS, wanted, _FILE)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template of a conversation; empty where the model has none. Where the model has another for conversations
    with tools, one template of both."""
    named = _named_templates(settings.get("chat_template") or _json(folder / _OLDER_TEMPLATE).get("chat_template"))
    files = [folder / _TEMPLATE, *sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))]
    for path in files:
        try:
            if path.is_file():
                name = _DEFAULT_TEMPLATE if path.name == _TEMPLATE else path.stem
                named[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerRefused(f"{path.name} cannot be read: {error}") from None
    if len(named) == 1:
        return next(iter(named.values()))
    default, with_tools = named.get(_DEFAULT_TEMPLATE, ""), named.get(_TOOL_TEMPLATE)
    if not default or with_tools is None:
        return default
    # Jinja drops the line break behind a block, and a template's last. What prints nothing keeps the spaces before one.
    default, with_tools = default.removesuffix("\n"), with_tools.removesuffix("\n")
    return f"{{% if tools %}}\n{with_tools}{{{{ '' }}}}{{% else %}}\n{default}{{{{ '' }}}}{{% endif %}}"


def _named_templates(found: Any) -> dict[str, str]:
    """Templates by their names, as settings have them: one, a list of objects, or an object."""
    if isinstance(found, str):
        return {_DEFAULT_TEMPLATE: found}
    if isinstance(found, list):
        found = {str(each.get("name")): each.get("template") for each in found if isinstance(each, dict)}
    return {name: one for name, one in found.items() if isinstance(one, str)} if isinstance(found, dict) else {}


def _response_template(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the model marks the parts of its answers; None where the settings do not say."""
    found = settings.get("response_template")
    if found is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(found)
    except (ValueError, TypeError, KeyError) as error:
        raise TokenizerRefused(f"{_SETTINGS}: response_template cannot be read: {error}") from None
    template: Mapping[str, Any] = found
    return template


def _converted(folder: Path) -> Tokenizer:
    """The tokenizer of a folder with files of another kind, as transformers converts them. One that loses text is
    refused: it was converted as another kind than it is."""
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder))
    # A broken file makes transformers raise anything.
    except Exception as error:
        (reason, *_) = str(error).strip().splitlines() or [type(error).__name__]
        raise TokenizerRefused(f"there is no {_FILE}, and its other files cannot be read: {reason}") from None
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerRefused(f"there is no {_FILE}, and a {type(found).__name__} cannot be converted to one")
    backend = Tokenizer.from_str(backend.to_str())
    if not (probes := _probes(backend)):
        raise TokenizerRefused(f"there is no {_FILE}, and as a {type(found).__name__} its other files have no words")
    for probe in probes:
        back = backend.decode(backend.encode(probe, add_special_tokens=False).ids)
        if back.strip().lower() != probe:
            raise TokenizerRefused(
                f"there is no {_FILE}, and as a {type(found).__name__} its other files turn {probe!r} into {back!r}"
            )
    return backend


def _probes(backend: Tokenizer) -> list[str]:
    """Texts of two words that the vocabulary has, so that they come back unless it was converted as another kind."""
    words = sorted(text for text in backend.get_vocab() if text.isascii() and text.isalpha() and text.islower())
    return [f"{first} {second}" for first, second in zip(words[::2], words[1::2], strict=False)][:_MOST_PROBES]
