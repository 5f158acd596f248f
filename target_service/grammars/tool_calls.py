"""Grammars of answers that call tools, in the text that a model writes calls in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Template
from typing import Any

from target_service.grammars.lark_terms import json_of, literal
from target_service.grammars.tagged_arguments import tagged_arguments
from target_service.text.answer_format import CallText
from target_service.text.tokenizer import ModelTokenizer


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
    none (None). Raises `InvalidField` for arguments that the format cannot be held to."""
    rules = []
    for i, schema in enumerate(parameters.values()):
        if call.argument:
            rules += tagged_arguments(call, f"args{i}", schema, tokenizer)
        else:
            rules.append(f"args{i}: {json_of(schema)}")
    for i, name in enumerate(parameters):
        text = Template(call.text).substitute(name=json.dumps(name), bare_name=name, index=0, arguments="\0")
        before, _, after = text.partition("\0")
        rules.append(f"call{i}: {literal(before, tokenizer)} args{i} {literal(after, tokenizer)}")
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(parameters))))
    calls = "call"
    if not (single or call.single):
        calls = f"call ({literal(call.separator, tokenizer)} call)*"
    start = f"{literal(call.begin, tokenizer)} {calls} {literal(call.end, tokenizer)}"
    if reasoning is not None:
        # Up to its end, and from its beginning where the answer is not inside of it yet.
        rules.append(rf"reasoning[lazy]: /{'' if reasoning else '<think>'}(?s:.*)<\/think>/")
        thought = r"reasoning /\s{0,2}/"
        start = f"{thought if reasoning else f'({thought})?'} {start}"
    return "\n".join((f"start: {start}", *rules))
