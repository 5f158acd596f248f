"""Arguments of calls that are written one by one between tags, strings as they stand and other values as JSON.

They are read back by their types: a value whose type the schema leaves open could not be told from a string, so such
arguments are not held to a form. Arguments come in the order in which the schema lists them. A string within JSON may
still hold a closing tag, which the reader takes for the argument's end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Template
from typing import Any

from outrider.errors import InvalidField
from target_service.grammars.lark_terms import json_of, literal, special_tokens
from target_service.text.answer_format import CallText
from target_service.text.tokenizer import ModelTokenizer

# What may stand in a schema of arguments, and in that of a string, without being left out of the grammar.
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}


def tagged_arguments(call: CallText, name: str, schema: Mapping[str, Any], tokenizer: ModelTokenizer) -> list[str]:
    """Rules of Lark for the arguments that a schema describes, the first of them named `name`. Raises `InvalidField`
    where the schema asks for what this text cannot be held to."""
    _only(
        schema, _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}, "arguments"
    )
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if required - properties.keys():
        raise _cannot_hold("arguments that are required and not described")
    before, between, _ = _around(call)
    free = _free_text(name, call, tokenizer)
    if not properties:
        if schema.get("additionalProperties") is False:
            return [f'{name}: ""']
        # Nothing is known of them.
        begin, middle = literal(before, tokenizer), literal(between, tokenizer)
        key = r"/[A-Za-z_][A-Za-z0-9_.-]{0,127}/"
        return [f"{name}: {name}_any*", f"{name}_any: {begin} {key} {middle} {name}_text", *free]
    rules, whole = list[str](), list[str]()
    for place, (key, own) in enumerate(properties.items()):
        one = f"{name}_{place}"
        value = " | ".join(_values(name, key, own, schema, tokenizer, call))
        rules.append(f"{one}: {literal(before + key + between, tokenizer)} ({value})")
        whole.append(one if key in required else f"{one}?")
    return [f"{name}: {' '.join(whole)}", *rules, *free]


def _values(
    name: str, key: str, own: Any, schema: Mapping[str, Any], tokenizer: ModelTokenizer, call: CallText
) -> Iterator[str]:
    """What may stand in one argument's place, with the text behind it."""
    *_, after = _around(call)
    if not isinstance(own, Mapping) or key != key.strip() or re.search(r"[<>\n]", key) or not key:
        raise _cannot_hold(f"the argument {key!r}")
    kind = own.get("type")
    if isinstance(kind, str) and kind in {"integer", "number", "boolean", "null", "object", "array"}:
        definitions = {each: schema[each] for each in ("$defs", "definitions") if each in schema}
        yield f"{json_of({**definitions, **own})} {literal(after, tokenizer)}"
        return
    if kind != "string":
        raise _cannot_hold(f"the argument {key!r}, whose type is open,")
    _only(own, _NOTES | {"type", "enum", "const"}, f"the string {key!r}")
    listed = [own["const"]] if "const" in own else own.get("enum")
    if listed is None:
        yield f"{name}_text"
        return
    for each in listed:
        # What is read back has lost lines at its ends.
        if not isinstance(each, str) or each != each.strip() or "<" in each:
            raise _cannot_hold(f"the value {each!r} of {key!r}")
        yield literal(each + after, tokenizer)


def _free_text(name: str, call: CallText, tokenizer: ModelTokenizer) -> list[str]:
    """The rules of a string as it stands and the text behind it: up to the first mark that ends the argument, and
    without the mark that ends the call."""
    *_, after = _around(call)
    ends, special = _first_tag(after), special_tokens(tokenizer)
    of_call = _first_tag(call.text.partition("$arguments")[2])
    terminal, inside = f"{name}_text".upper(), f"/(?s:.*)/ & ~/(?s:.*){_regex(of_call)}(?s:.*)/"
    rest = after.partition(ends)[2]
    if ends in special:
        # No text has it.
        return [f"{name}_text: {terminal} {literal(ends + rest, tokenizer)}", f"{terminal}: {inside}"]
    ended = f"{terminal}: ({inside}) /{_regex(ends)}/"
    return [f"{name}_text: {name}_ended {literal(rest, tokenizer)}", f"{name}_ended[lazy]: {terminal}", ended]


def _around(call: CallText) -> tuple[str, str, str]:
    """The text of an argument before its name, between that and the value, and behind the value."""
    text = Template(call.argument).substitute(key="\0", value="\0")
    before, between, after = text.split("\0")
    return before, between, after


def _first_tag(text: str) -> str:
    found = re.search(r"<[^>]+>", text)
    assert found is not None, "arguments and calls end with a tag"
    return found.group()


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _only(schema: Mapping[str, Any], known: set[str], what: str) -> None:
    others = sorted(schema.keys() - known)
    if others:
        raise _cannot_hold(f"{others[0]!r} of {what}")


def _cannot_hold(what: str) -> InvalidField:
    return InvalidField("chat.tools.definitions", f"{what} cannot be held to in the text of this model's calls")
