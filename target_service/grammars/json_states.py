"""States of a JSON form, named by what decides which text may follow: texts of one name are followed by the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple
from urllib.parse import unquote

# Bytes that a name keeps of the value under way, and of the objects and arrays around it. Chosen: what a longer one
# names seldom comes again.
_VALUE_BYTES, _AROUND_BYTES = 64, 1024
# References that lead to each other. Chosen, as deep as a schema may be.
_MOST_DEPTH = 64
# Keywords that change nothing of what is allowed where they stand, and those that are understood here.
_NOTES = {"title", "description", "default", "examples", "$comment", "$schema", "$defs", "definitions", "deprecated"}
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_OF_CONTAINERS = {"properties", "required", "additionalProperties", "items", "minItems", "maxItems"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_KNOWN = {"type", "enum", "const", *_OF_STRINGS, *_OF_CONTAINERS, *_OF_NUMBERS}
_SPACE, _DIGIT_OR_WORD, _ESCAPED = b" \t\r\n", b"-0123456789tfn", b'"\\/bfnrt'
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_DONE = b"_"
# Of characters of one byte, which end or change nothing within a string.
_PLAIN = re.compile(rb'[^"\\\x00-\x1F\x80-\xFF]*')


class _At(IntEnum):
    """Where in a text of JSON something stands."""

    BETWEEN = 0  # values and names
    NAME = 1  # of a property
    NAME_ESCAPE = 2
    COUNTED = 3  # a string of which the number of characters counts alone
    COUNTED_ESCAPE = 4
    STRING = 5  # another one
    STRING_ESCAPE = 6
    WORD = 7  # a number, or a name such as `true`
    WHOLE = 8  # an object or array that is kept as it stands
    WHOLE_STRING = 9
    WHOLE_ESCAPE = 10
    ENDED = 11


class _Opened(NamedTuple):
    """An object or array that is under way: its text with `_` for every value that is complete, and the name of the
    property that came last."""

    container: _Container
    done: bytes
    name: str = ""


class JsonState(NamedTuple):
    """A state: what is open, where in it, what was read of the value under way, the characters of a string before that,
    and how many objects and arrays are open in it."""

    opened: tuple[_Opened, ...] = ()
    at: _At = _At.BETWEEN
    text: bytes = b""
    characters: int = 0
    depth: int = 0

    def is_short(self) -> bool:
        """Whether it is likely enough that other texts of the form have this state."""
        around = sum([len(each.done) for each in self.opened])
        return len(self.text) <= _VALUE_BYTES and around <= _AROUND_BYTES

    def counts_characters(self) -> bool:
        """Whether it is within a string of which the number of characters counts alone, and not within a character."""
        return self.at == _At.COUNTED and not self.text


def _end_of_plain(state: JsonState, text: bytes, begin: int) -> int:
    """Where the first byte of a text is that has to be looked at alone."""
    if state.at == _At.COUNTED and state.text:
        return begin
    if state.at in (_At.COUNTED, _At.NAME, _At.STRING, _At.WHOLE_STRING):
        found = _PLAIN.match(text, begin)
        return begin if found is None else found.end()
    return begin


def plain_length(text: bytes) -> int | None:
    """The characters of a text that a string of JSON has as it stands; None for another text."""
    if _QUOTE in text or _BACKSLASH in text or not text or min(text) < 0x20:
        return None
    try:
        return len(text.decode())
    except UnicodeDecodeError:
        return None


@dataclass(eq=False, slots=True)
class _Value:
    """What is known of the values at one place of a schema.

    Attributes:
        counts: whether the number of a string's characters alone decides what may follow.
        most: the number from which on more change nothing; None if all do.
        object, array: of which schema those are; None where several are possible, or one that is not understood.
    """

    counts: bool = False
    most: int | None = None
    object: _Container | None = None
    array: _Container | None = None


@dataclass(eq=False, slots=True)
class _Container:
    """The schema of an object or array: of its properties by name, and of other properties or of items."""

    is_object: bool
    properties: Mapping[str, Any]
    others: Any
    is_bounded: bool


class JsonStates:
    """The states of one JSON Schema, as llguidance compiles it: values are rules of their own, so behind a complete one
    it does not matter what it was, as long as one schema alone can hold around it. Where several can, or a keyword
    stands that is not known here, the text is kept as it is. Of a string without a pattern, a format and listed values
    only the number of its characters counts.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._values: dict[int, _Value] = {}
        self._root = self._value(schema)

    def behind(self, state: JsonState | None, text: bytes) -> JsonState | None:
        """The state behind a text that follows another one; None where JSON does not go on so."""
        at = 0
        while at < len(text) and state is not None:
            end = _end_of_plain(state, text, at)
            if end > at:
                state = self._behind_plain(state, text[at:end])
                at = end
            else:
                state = self._step(state, text[at])
                at += 1
        return state

    def _behind_plain(self, state: JsonState, text: bytes) -> JsonState:
        if state.at == _At.COUNTED:
            return self._count(state, len(text))
        return state._replace(text=state.text + text)

    def _step(self, state: JsonState, byte: int) -> JsonState | None:
        at = state.at
        if at == _At.COUNTED:
            return self._counted(state, byte)
        if at == _At.COUNTED_ESCAPE:
            if byte in _ESCAPED:
                return self._count(state)
            return state._replace(at=_At.STRING, text=b"\\" + bytes([byte]))
        if at == _At.BETWEEN:
            return self._between(state, byte)
        if at in (_At.NAME, _At.NAME_ESCAPE):
            return _named(state, byte)
        if at == _At.WORD:
            if byte not in b",]}" and byte not in _SPACE:
                return state._replace(text=state.text + bytes([byte]))
            return self._step(_completed(state), byte)
        if at == _At.ENDED:
            return state._replace(text=state.text + bytes([byte])) if byte in _SPACE else None
        return _verbatim(state, byte)

    def _counted(self, state: JsonState, byte: int) -> JsonState | None:
        if state.text:
            text = state.text + bytes([byte])
            if byte & 0xC0 != 0x80:
                return None
            try:
                text.decode()
            except UnicodeDecodeError:
                return state._replace(text=text) if len(text) < 4 else None
            return self._count(state)
        if byte == _QUOTE:
            return _completed(state)
        if byte == _BACKSLASH:
            return state._replace(at=_At.COUNTED_ESCAPE)
        if byte >= 0x80:
            return state._replace(text=bytes([byte]))
        return self._count(state) if byte >= 0x20 else None

    def _count(self, state: JsonState, characters: int = 1) -> JsonState:
        most, count = self._here(state).most, state.characters + characters
        return JsonState(state.opened, _At.COUNTED, b"", count if most is None else min(count, most))

    def _between(self, state: JsonState, byte: int) -> JsonState | None:
        if not state.opened:
            if byte in _SPACE:
                return state._replace(text=state.text + bytes([byte]))
            return self._begun(state, byte)
        own = state.opened[-1]
        last = own.done.rstrip(_SPACE)[-1]
        if byte in _SPACE:
            return _inside(state, own._replace(done=own.done + bytes([byte])))
        if byte == b"]}"[own.container.is_object] and last not in b":,":
            return _completed(state._replace(opened=state.opened[:-1]))
        if byte == _COMMA and last == _DONE[0]:
            # Of items whose number is not bounded one is as many.
            one = not own.container.is_object and not own.container.is_bounded
            return _inside(state, own._replace(done=b"[_," if one else own.done + b","))
        if own.container.is_object and last != _COLON:
            if byte == _QUOTE and last in b"{,":
                return state._replace(at=_At.NAME)
            if byte == _COLON and last == _QUOTE:
                return _inside(state, own._replace(done=own.done + b":"))
            return None
        return self._begun(state, byte) if last in b"[,:" else None

    def _begun(self, state: JsonState, byte: int) -> JsonState | None:
        """The state behind the first byte of a value."""
        value, first = self._here(state), bytes([byte])
        if byte == _QUOTE:
            return JsonState(state.opened, _At.COUNTED) if value.counts else JsonState(state.opened, _At.STRING, first)
        if first in (b"{", b"["):
            container = value.object if first == b"{" else value.array
            if container is None:
                return JsonState(state.opened, _At.WHOLE, first, 0, 1)
            return JsonState((*state.opened, _Opened(container, first)))
        return JsonState(state.opened, _At.WORD, first) if byte in _DIGIT_OR_WORD else None

    def _here(self, state: JsonState) -> _Value:
        """What is known of the value that stands or begins here."""
        if not state.opened:
            return self._root
        own = state.opened[-1]
        return self._value(own.container.properties.get(own.name, own.container.others))

    def _value(self, schema: Any) -> _Value:
        # Of the whole schema, which keeps its parts.
        found = self._values.get(id(schema))
        if found is None:
            found = self._values[id(schema)] = self._value_of(schema)
        return found

    def _value_of(self, schema: Any) -> _Value:
        leaves = self._leaves(schema, 0)
        if leaves is None:
            return _Value()
        strings = [leaf for leaf in leaves if _holds(leaf, "string", str)]
        counts = not any([leaf.keys() & {"enum", "const", "pattern", "format"} for leaf in strings])
        is_bounded = any(["maxLength" in leaf for leaf in strings])
        most = None if is_bounded else max([leaf.get("minLength", 0) for leaf in strings], default=0)
        objects = [leaf for leaf in leaves if _holds(leaf, "object", dict)]
        arrays = [leaf for leaf in leaves if _holds(leaf, "array", list)]
        return _Value(counts, most, _container(objects, is_object=True), _container(arrays, is_object=False))

    def _leaves(self, schema: Any, depth: int) -> list[Mapping[str, Any]] | None:
        """The schemas of which a value has one: those without alternatives. None where one is not understood."""
        if schema is True:
            return [{}]
        if not isinstance(schema, dict) or depth > _MOST_DEPTH:
            return None
        keywords = schema.keys() - _NOTES
        if keywords == {"$ref"}:
            return self._leaves(self._definition(schema["$ref"]), depth + 1)
        if keywords == {"anyOf"}:
            found = list[Mapping[str, Any]]()
            for each in schema["anyOf"]:
                leaves = self._leaves(each, depth + 1)
                if leaves is None or len(found) > _MOST_DEPTH:
                    return None
                found += leaves
            return found
        return [schema] if keywords <= _KNOWN else None

    def _definition(self, reference: str) -> Any:
        """What a reference within the schema leads to; None for another one."""
        found, (first, *path) = self._schema, reference.split("/")
        if first != "#":
            return None
        for each in path:
            name = unquote(each).replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return None
            found = found[name]
        return found


def _holds(leaf: Mapping[str, Any], name: str, kind: type) -> bool:
    """Whether values of a type may have a schema."""
    if "enum" in leaf or "const" in leaf:
        return any([isinstance(each, kind) for each in [*leaf.get("enum", ()), leaf.get("const")]])
    types = leaf.get("type", name)
    return name in ([types] if isinstance(types, str) else types)


def _container(leaves: Sequence[Mapping[str, Any]], *, is_object: bool) -> _Container | None:
    """The one schema of objects or arrays that these are; None if it is not one."""
    if len(leaves) != 1 or leaves[0].keys() & {"enum", "const"}:
        return None
    (leaf,) = leaves
    others = leaf.get("additionalProperties" if is_object else "items", True)
    is_bounded = bool(leaf.keys() & {"minItems", "maxItems"})
    return _Container(is_object, leaf.get("properties", {}) if is_object else {}, others, is_bounded)


def _inside(state: JsonState, own: _Opened) -> JsonState:
    return JsonState((*state.opened[:-1], own))


def _completed(state: JsonState) -> JsonState:
    """The state behind a value, which is all but what is open."""
    if not state.opened:
        return JsonState((), _At.ENDED)
    own = state.opened[-1]
    return _inside(state, own._replace(done=own.done + _DONE))


def _named(state: JsonState, byte: int) -> JsonState | None:
    """The state behind a byte of a property's name."""
    if state.at == _At.NAME and byte == _QUOTE:
        own, quoted = state.opened[-1], b'"' + state.text + b'"'
        try:
            return _inside(state, own._replace(done=own.done + quoted, name=json.loads(quoted)))
        except ValueError:
            return None
    escapes = state.at == _At.NAME and byte == _BACKSLASH
    return state._replace(at=_At.NAME_ESCAPE if escapes else _At.NAME, text=state.text + bytes([byte]))


def _verbatim(state: JsonState, byte: int) -> JsonState:
    """The state behind a byte of a value that is kept as it stands."""
    at, depth = state.at, state.depth
    if at in (_At.STRING_ESCAPE, _At.WHOLE_ESCAPE):
        at = _At(at - 1)
    elif at in (_At.STRING, _At.WHOLE_STRING):
        if byte == _BACKSLASH:
            at = _At(at + 1)
        elif byte == _QUOTE:
            if at == _At.STRING:
                return _completed(state)
            at = _At.WHOLE
    elif byte == _QUOTE:
        at = _At.WHOLE_STRING
    elif byte in b"{[":
        depth += 1
    elif byte in b"}]":
        depth -= 1
        if not depth:
            return _completed(state)
    return JsonState(state.opened, at, state.text + bytes([byte]), state.characters, depth)
