"""A model folder's tokenizer with its chat template: how prompts begin and end, and what answers look like."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from outrider.checkpoints.tokenizer_files import (
    TOKENIZER_FILE,
    TOKENIZER_SETTINGS,
    TokenizerRefused,
    read_object,
    read_tokenizer,
    text_of_token,
)
from target_service.text.tokenizer import SPECIAL_NAMES, ModelTokenizer

log = logging.getLogger(__name__)

_TEMPLATE = "chat_template.jinja"
# Which of several named templates is for conversations without tools, and which for those with them.
_DEFAULT_TEMPLATE = "default"


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model folder. Raises `TokenizerRefused`."""
    settings = read_object(folder / TOKENIZER_SETTINGS)
    names = {**read_object(folder / "special_tokens_map.json"), **settings}
    special = {name: text for name in SPECIAL_NAMES if (text := text_of_token(names.get(name)))}
    backend = read_tokenizer(folder, special.values())
    if (folder / TOKENIZER_FILE).is_file():
        _settle_begin_and_end(backend, settings, special)
        _compare_prefix_space(backend, settings)
    split = settings.get("split_special_tokens") is True
    return ModelTokenizer(
        backend,
        chat_template=_chat_template(folder, settings),
        special_tokens=special,
        split_special=split,
        response_template=_response_template(settings),
    )


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
        log.info("prompts begin and end as %s says, and not as %s does", TOKENIZER_SETTINGS, TOKENIZER_FILE)


def _compare_prefix_space(backend: Tokenizer, settings: Mapping[str, Any]) -> None:
    wanted, parts = settings.get("add_prefix_space"), backend.pre_tokenizer
    if not isinstance(wanted, bool) or parts is None:
        return
    state = json.loads(parts.__getstate__())
    found = state.get("add_prefix_space", {"never": False}.get(state.get("prepend_scheme", ""), wanted))
    if found != wanted:
        log.warning(
            "%s says add_prefix_space %s, and %s otherwise: the latter holds",
            TOKENIZER_SETTINGS,
            wanted,
            TOKENIZER_FILE,
        )


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    """The template of a conversation; empty where the model has none. Where the model has another for conversations
    with tools, one template of both."""
    named = _named_templates(
        settings.get("chat_template") or read_object(folder / "chat_template.json").get("chat_template")
    )
    files = [folder / _TEMPLATE, *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for path in files:
        try:
            if path.is_file():
                name = _DEFAULT_TEMPLATE if path.name == _TEMPLATE else path.stem
                named[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerRefused(f"{path.name} cannot be read: {error}") from None
    if len(named) == 1:
        return next(iter(named.values()))
    default, with_tools = named.get(_DEFAULT_TEMPLATE, ""), named.get("tool_use")
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
    """How the model marks the parts of its answers; None where the settings have no entry."""
    found = settings.get("response_template")
    if found is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(found)
    except (ValueError, TypeError, KeyError) as error:
        raise TokenizerRefused(f"{TOKENIZER_SETTINGS}: response_template cannot be read: {error}") from None
    template: Mapping[str, Any] = found
    return template
