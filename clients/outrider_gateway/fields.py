"""Reading the fields of a JSON object one by one: typed, bounded, and none left over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from outrider_gateway.failures import BadField


class Fields:
    """A JSON object whose fields are taken one after the other. A field that is null counts as not given. Raises
    `BadField`, which names the field with its path."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = f"{path}." if path else ""

    def path(self, name: str) -> str:
        """How the field is called in messages."""
        return self._path + name

    def take(self, name: str, default: Any = None) -> Any:
        return self._values.pop(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise BadField(self.path(name), "must be true or false", "invalid_type")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        return None if value is None else whole(value, self.path(name), low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        return number(self.take(name, default), self.path(name), low, high)

    def text(self, name: str, default: str = "") -> str:
        return text(self.take(name, default), self.path(name))

    def inner(self, name: str) -> Fields | None:
        """An object as fields of its own."""
        value = self.take(name)
        return None if value is None else Fields(mapping(value, self.path(name)), self.path(name))

    def ignore(self, names: Iterable[str]) -> None:
        """Take fields that change nothing here."""
        for name in names:
            self.take(name)

    def left(self) -> tuple[str, ...]:
        """The names of what was not taken yet."""
        return tuple(self._values)

    def end(self) -> None:
        """Refuse whatever was not taken."""
        for name in self._values:
            raise BadField(self.path(name), "is not supported by this server", "unsupported_parameter")


def text(value: Any, path: str) -> str:
    """`value` as a string."""
    if not isinstance(value, str):
        raise BadField(path, "must be a string", "invalid_type")
    return value


def whole(value: Any, path: str, low: int, high: int) -> int:
    """`value` as a whole number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadField(path, "must be a whole number", "invalid_type")
    if not low <= value <= high:
        raise BadField(path, f"must be in {low}..{high}", "invalid_value")
    return value


def number(value: Any, path: str, low: float, high: float) -> float:
    """`value` as a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadField(path, "must be a number", "invalid_type")
    if not (math.isfinite(value) and low <= value <= high):
        raise BadField(path, f"must be in [{low:g}, {high:g}]", "invalid_value")
    return float(value)


def mapping(value: Any, path: str) -> Mapping[str, Any]:
    """`value` as an object."""
    if not isinstance(value, dict):
        raise BadField(path, "must be an object", "invalid_type")
    return value


def items(value: Any, path: str) -> list[Any]:
    """`value` as a list."""
    if not isinstance(value, list):
        raise BadField(path, "must be a list", "invalid_type")
    return value
