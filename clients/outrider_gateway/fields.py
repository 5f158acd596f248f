"""Reading a JSON object into msgspec structs, field by field: typed, bounded, and none left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

import msgspec
import orjson
from msgspec import inspect

from outrider_gateway.failures import BadField
from outrider_gateway.request_fields import RequestField, Use

Read = TypeVar("Read")
# What a value must be, by msgspec's names of types.
_KINDS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a string", "object": "an object",
    "array": "a list",
}  # fmt: skip
# What msgspec says of a value, and the steps of its place.
_EXPECTED, _MISSING = re.compile("Expected `(.+?)`"), re.compile(r"Object missing required field `(\w+)`")


class BodyObject(msgspec.Struct, kw_only=True):
    """An object of a body, of which a field that is null counts as not given. Fields named in `ignored` change
    nothing."""

    ignored: ClassVar[tuple[str, ...]] = ()


Kind = TypeVar("Kind", bound=msgspec.Struct)
Nested = TypeVar("Nested", bound=BodyObject)


class Fields:
    """The fields of a JSON object that were not read yet. A field that is null counts as not given. Raises `BadField`,
    which names the field with its path."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        # What was asked for: the object's fields, once it is read.
        self._known: set[str] = set()
        self._path = path

    def path(self, name: str) -> str:
        """How the field is called in messages."""
        return f"{self._path}.{name}" if self._path else name

    def read(self, kind: type[Kind]) -> Kind:
        """The fields that `kind` has."""
        names = kind.__struct_fields__
        self._known.update(names)
        values = {name: self._values.pop(name) for name in names if name in self._values}
        for name, value in values.items():
            # JSON has one kind of number, and some languages write 2 as 2.0.
            if type(value) is float and value.is_integer():
                values[name] = int(value)
        return converted(values, kind, self._path)

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that change nothing here."""
        self._known.update(names)
        # A conversation has thousands of messages, and most have no such field.
        if self._values:
            for name in names:
                self._values.pop(name, None)

    def end(self, table: Mapping[str, RequestField] | None = None) -> None:
        """Refuse whatever was not read, but for what the table ignores, and harmless values of what it refuses."""
        table = table or {}
        for name, value in self._values.items():
            field = table.get(name)
            if field is None:
                raise BadField(self.path(name), self._unknown({*self._known, *table}, name), "unknown_parameter")
            self._dispose(field, value)

    def refuse(self, table: Mapping[str, RequestField], kind: type[msgspec.Struct]) -> None:
        """Dispose of fields now, as `end` does, that `kind` has and the table does not take."""
        for name in kind.__struct_fields__:
            if table[name].use is not Use.TAKEN and (value := self._values.pop(name, None)) is not None:
                self._dispose(table[name], value)

    def _dispose(self, field: RequestField, value: Any) -> None:
        if field.use is not Use.IGNORED and not any(_same(value, one) for one in field.harmless):
            # A field that is taken is left where an endpoint makes no answer.
            why = "it shapes answers" if field.use is Use.TAKEN else field.note
            raise BadField(self.path(field.name), f"is not supported: {why}", "unsupported_parameter")

    def _unknown(self, known: Iterable[str], name: str) -> str:
        # A name may be as long as the body.
        near = get_close_matches(name[:64], sorted(known), 1)
        return "is no field that is known here" + (f"; did you mean {self.path(near[0])}?" if near else "")


def read_object(kind: type[Nested], value: Any, path: str) -> Nested:
    """A value as an object that has these fields and no others. Raises `BadField`."""
    if value == {}:
        # As where it is not given.
        return converted(value, kind, path)
    fields = Fields(value if type(value) is dict else converted(value, dict[str, Any], path), path)
    found = fields.read(kind)
    fields.ignore(kind.ignored)
    fields.end()
    return found


def converted(value: Any, kind: type[Read], path: str) -> Read:
    """`value` as `kind`, of msgspec's types. Raises `BadField` for the first part of it that is no such value."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _bad_field(error, kind, path) from None


def json_bytes(value: Any, path: str) -> bytes:
    """A value as JSON again."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadField(path, str(error), "invalid_value") from None


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same. In Python 1 is true, but 1.0 may stand for 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def _bad_field(error: msgspec.ValidationError, kind: Any, path: str) -> BadField:
    """What msgspec says of a value, in words of JSON, with all that would be taken."""
    message, _, place = str(error).partition(" - at ")
    # As in `$.stop[1]`; the keys of an object have no place of their own.
    inner = place.rpartition("`$")[2].rstrip("`").removesuffix("[...]")
    at = (path + inner).removeprefix(".")
    if missing := _MISSING.fullmatch(message):
        return BadField(f"{at}.{missing[1]}".removeprefix("."), "is missing", "missing_required_parameter")
    expected = _EXPECTED.match(message)
    if expected and message.startswith(",", expected.end()):
        kinds = " or ".join([_KINDS[name] for name in expected[1].split(" | ") if name in _KINDS])
        return BadField(at, f"must be {kinds}", "invalid_type")
    found = _flat(inspect.type_info(kind))
    for step in re.findall(r"\[\d+\]|\w+", inner):
        found = [one for each in found for one in _inside(each, step)]
    name = expected[1] if expected else "literal"
    return BadField(at, next(filter(None, (_limits(one, name) for one in found)), message), "invalid_value")


def _flat(found: inspect.Type) -> list[inspect.Type]:
    """The types of a union, or one."""
    if isinstance(found, inspect.Metadata):
        return _flat(found.type)
    return [one for each in found.types for one in _flat(each)] if isinstance(found, inspect.UnionType) else [found]


def _inside(found: inspect.Type, step: str) -> list[inspect.Type]:
    """The types of a struct's field, or of a list's entries."""
    if isinstance(found, inspect.StructType):
        return [one for field in found.fields if field.name == step for one in _flat(field.type)]
    return _flat(found.item_type) if isinstance(found, inspect.ListType | inspect.VarTupleType) else []


def _limits(found: inspect.Type, name: str) -> str:
    """What values a type takes that msgspec calls by this name; empty for another type."""
    match name, found:
        case "literal", inspect.LiteralType(values=values):
            return f"must be {'one of ' * (len(values) > 1)}{', '.join(map(str, values))}"
        case "int", inspect.IntType(ge=low, le=high):
            return f"must be at least {low}" if high is None else f"must be in {low}..{high}"
        case "float", inspect.FloatType(gt=above, ge=low, le=high):
            return f"must be in {f'[{low:g}' if above is None else f'({above:g}'}, {high:g}]"
        case "str", inspect.StrType(max_length=most):
            return "is empty" if most is None else f"has more than {most} characters"
        case "array" | "object", inspect.ListType() | inspect.VarTupleType() | inspect.DictType():
            least, most = found.min_length, found.max_length
            return f"must have {least} to {most} entries" if least else f"has more than {most} entries"
    return ""
