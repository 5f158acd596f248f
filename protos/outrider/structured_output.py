"""The form that an output is kept to: a frozen value, and the limits that do not depend on the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidField, check_most

# A published schema has some kilobytes; the compiler's own limits are on the grammar that a form makes. Chosen.
MAX_FORM_BYTES = 65536
MAX_SCHEMA_DEPTH = 64
TOO_DEEP = f"is more than {MAX_SCHEMA_DEPTH} levels deep"
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an output: exactly one of the first five is set. Limits and meaning: `StructuredOutput` in
    tree.proto. `json_schema` is JSON text, and `grammar` a Lark grammar."""

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choices: tuple[str, ...] = ()
    grammar: str | None = None
    free_whitespace: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """The names of the forms that are set."""
        given = {
            "json_schema": self.json_schema is not None,
            "json_object": self.json_object,
            "regex": self.regex is not None,
            "choices": bool(self.choices),
            "grammar": self.grammar is not None,
        }
        return tuple(name for name, is_set in given.items() if is_set)

    @property
    def form(self) -> str:
        """The name of the form."""
        return self.forms[0]

    def check(self, field_path: str = "structured_output") -> None:
        """Raise `InvalidField` unless one form is set, within its limits. Whether it can be compiled is for the
        target to say."""
        if len(self.forms) != 1:
            names = "json_schema, json_object, regex, choices, grammar"
            raise InvalidField(field_path, f"needs exactly one of {names}, not {len(self.forms)}")
        path, text = f"{field_path}.{self.form}", self.json_schema or self.regex or self.grammar
        if self.choices:
            _check_choices(self.choices, path)
        elif not self.json_object:
            _check_size(len((text or "").encode()), path)
        if self.json_schema is not None:
            _check_schema(self.json_schema, path)
        if self.free_whitespace and self.form not in ("json_schema", "json_object"):
            raise InvalidField(f"{field_path}.free_whitespace", "is for JSON")


def _check_size(size: int, path: str) -> None:
    if not 0 < size <= MAX_FORM_BYTES:
        raise InvalidField(path, f"must have 1 to {MAX_FORM_BYTES} bytes")


def _check_choices(choices: tuple[str, ...], path: str) -> None:
    check_most(path, len(choices), MAX_CHOICES)
    if not all(choices) or len(set(choices)) < len(choices):
        raise InvalidField(path, "must be different texts, none of them empty")
    _check_size(sum(len(choice.encode()) for choice in choices), path)


def _check_schema(text: str, path: str) -> None:
    """Raise `InvalidField` unless the text is a JSON object that is not too deep."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise InvalidField(path, TOO_DEEP) from None
    except ValueError as error:
        raise InvalidField(path, f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidField(path, "must be a JSON object")
    if is_too_deep(schema):
        raise InvalidField(path, TOO_DEEP)


def is_too_deep(value: Any) -> bool:
    """Whether a value that JSON has is of more than `MAX_SCHEMA_DEPTH` levels."""
    level: list[Any] = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
