"""Reading the fields of a JSON object one by one: typed, bounded, and none left over."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import orjson

from outrider_gateway.failures import BadField
from outrider_gateway.request_fields import RequestField, Use

Json = TypeVar("Json")
Sized = TypeVar("Sized", bound=Collection[Any])
# Of a name. Chosen: a path of a file system.
_MOST_CHARACTERS = 4096
# What a value must be, by the type that the JSON reader makes of it.
_KINDS = {bool: "true or false", int: "a whole number", str: "a string", dict: "an object", list: "a list"}


class Fields:
    """A JSON object whose fields are taken one after the other. A field that is null counts as not given. Raises
    `BadField`, which names the field with its path."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        # What was asked for: the object's fields, once it is read.
        self._known: set[str] = set()
        self._path = f"{path}." if path else ""

    def path(self, name: str) -> str:
        """How the field is called in messages."""
        return self._path + name

    def pop(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        return self._values.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        return typed(self.pop(name, default), bool, self.path(name))

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.pop(name)
        return None if value is None else whole(value, self.path(name), low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        return number(self.pop(name, default), self.path(name), low, high)

    def positive(self, name: str, default: float, high: float) -> float:
        """A finite number in (0, high]."""
        return number(self.pop(name, default), self.path(name), 0.0, high, open_low=True)

    def text(self, name: str, default: str = "") -> str:
        return typed(self.pop(name, default), str, self.path(name))

    def short_text(self, name: str, default: str = "") -> str:
        """A name, which goes into calls, messages and traces."""
        found = self.text(name, default)
        if len(found) > _MOST_CHARACTERS:
            raise BadField(self.path(name), f"has more than {_MOST_CHARACTERS} characters", "invalid_value")
        return found

    def inner(self, name: str) -> Fields | None:
        """An object as fields of its own."""
        value = self.pop(name)
        return None if value is None else Fields(typed(value, dict, self.path(name)), self.path(name))

    def rest(self) -> dict[str, Any]:
        """The fields that were not taken yet, which are taken by this."""
        rest, self._values = self._values, {}
        return rest

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that change nothing here."""
        for name in names:
            self.pop(name)

    def end(self, table: Mapping[str, RequestField] | None = None) -> None:
        """Refuse whatever was not taken, but for what the table ignores, and harmless values of what it refuses."""
        table = table or {}
        for name, value in self._values.items():
            field = table.get(name)
            if field is None:
                raise BadField(self.path(name), self._unknown({*self._known, *table}, name), "unknown_parameter")
            self._dispose(field, value)

    def refuse(self, table: Mapping[str, RequestField], names: Iterable[str]) -> None:
        """Dispose of fields now, as `end` does, that what is read next would take."""
        for name in names:
            if (value := self.pop(name)) is not None:
                self._dispose(table[name], value)

    def _dispose(self, field: RequestField, value: Any) -> None:
        if field.use is not Use.IGNORED and not any(_same(value, one) for one in field.harmless):
            raise BadField(self.path(field.name), f"is not supported: {field.note}", "unsupported_parameter")

    def _unknown(self, known: Iterable[str], name: str) -> str:
        # A name may be as long as the body.
        near = get_close_matches(name[:64], sorted(known), 1)
        return "is no field that is known here" + (f"; did you mean {self.path(near[0])}?" if near else "")


def _same(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same. In Python 1 is true, but 1.0 may stand for 1."""
    return value == other and isinstance(value, bool) is isinstance(other, bool)


def typed(value: Any, kind: type[Json], path: str) -> Json:
    """`value` as one of `_KINDS`."""
    # Not `isinstance`: true and false are no numbers.
    if type(value) is not kind:
        raise BadField(path, f"must be {_KINDS[kind]}", "invalid_type")
    return value


def whole(value: Any, path: str, low: int, high: int) -> int:
    """`value` as a whole number in [low, high]. JSON has one kind of number, and some languages write 2 as 2.0."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if not low <= (found := typed(value, int, path)) <= high:
        raise BadField(path, f"must be in {low}..{high}", "invalid_value")
    return found


def whole_numbers(values: Sequence[Any], path: str, low: int, high: int) -> tuple[int, ...]:
    """A list of whole numbers in [low, high]; a refusal names the first that is none."""
    # A prompt may have thousands. Not `isinstance`: true and false are no numbers.
    if set(map(type, values)) <= {int} and low <= min(values, default=low) and max(values, default=high) <= high:
        return tuple(values)
    for index, value in enumerate(values):
        # A path for each of a million would take seconds.
        if type(value) is not int or not low <= value <= high:
            whole(typed(value, int, f"{path}[{index}]"), f"{path}[{index}]", low, high)
    return tuple(values)


def json_bytes(value: Any, path: str) -> bytes:
    """A value as JSON again."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadField(path, str(error), "invalid_value") from None


def bounded(values: Sized, most: int, path: str) -> Sized:
    """A list or an object of at most so many entries, of which none has been looked at."""
    if len(values) > most:
        raise BadField(path, f"has more than {most} entries", "invalid_value")
    return values


def number(value: Any, path: str, low: float, high: float, *, open_low: bool = False) -> float:
    """`value` as a finite number in [low, high]; in (low, high] if it is `open_low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(path, "must be a number", "invalid_type")
    if not (math.isfinite(value) and low <= value <= high) or (open_low and value == low):
        raise BadField(path, f"must be in {'(' if open_low else '['}{low:g}, {high:g}]", "invalid_value")
    return float(value)
