"""Grammars of answers that call tools, in the text that a model writes calls in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from string import Template
from typing import Any

from target_service.text.answer_format import CallText
from target_service.text.tokenizer import ModelTokenizer

# As forms of output: whitespace that is fixed forces most, and a keyword that is not enforced is refused.
_JSON_OPTIONS = {"x-guidance": {"whitespace_flexible": False, "lenient": False}}
# Reasoning and its end, where the answer begins inside of it, and where it may begin with it.
_REASONING = {True: r"/(?s:.*)<\/think>/", False: r"/<think>(?s:.*)<\/think>/"}


def tool_call_grammar(
    call: CallText,
    parameters: Mapping[str, Mapping[str, Any]],
    tokenizer: ModelTokenizer,
    *,
    single: bool,
    reasoning: bool | None,
) -> str:
    """A Lark grammar of answers that are calls of tools, by the schemas of their arguments, and nothing else.
    `reasoning` says that the answer begins inside of the model's reasoning (True), may begin with some (False), or has
    none (None)."""
    rules = [f"args{i}: %json {_json({**_JSON_OPTIONS, **schema})}" for i, schema in enumerate(parameters.values())]
    for i, name in enumerate(parameters):
        text = Template(call.text).substitute(name=json.dumps(name), bare_name=name, index=0, arguments="\0")
        before, _, after = text.partition("\0")
        rules.append(f"call{i}: {_literal(before, tokenizer)} args{i} {_literal(after, tokenizer)}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(parameters))))
    calls = "call"
    if not (single or call.single):
        calls = f"call ({_literal(call.separator, tokenizer)} call)*"
    start = f"{_literal(call.begin, tokenizer)} {calls} {_literal(call.end, tokenizer)}"
    if reasoning is not None:
        rules.append(f"reasoning[lazy]: {_REASONING[reasoning]}")
        thought = r"reasoning /\s{0,2}/"
        start = f"{thought if reasoning else f'({thought})?'} {start}"
    return "\n".join((f"start: {start}", *rules))


def _literal(text: str, tokenizer: ModelTokenizer) -> str:
    """A text in Lark's terms, in which names of special tokens are those tokens."""
    special = {name: token for token in tokenizer.special_ids if (name := tokenizer.backend.id_to_token(token))}
    # A group keeps what it splits by; the longest come first.
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else _json(part) for part in parts if part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
