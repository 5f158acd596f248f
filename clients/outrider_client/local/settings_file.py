"""Settings files of the services (TOML), with a candidate's settings in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.settings import SettingsError, read_toml

Document = dict[str, dict[str, Any]]


def read_document(path: Path | None) -> Document:
    """The tables of a settings file; none without a file. Raises `SettingsError` for an invalid file."""
    if path is None:
        return {}
    document = read_toml(path)
    for section, table in document.items():
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {section} is not a table")
    # Normalized as the services do, so that a setting written in either way is replaced.
    tables = document.items()
    return {section: {name.replace("-", "_"): value for name, value in table.items()} for section, table in tables}


def with_settings(document: Mapping[str, Mapping[str, Any]], settings: Iterable[tuple[str, str, Any]]) -> Document:
    """A copy of a document in which each (section, name, value) is set."""
    copy = {section: dict(table) for section, table in document.items()}
    for section, name, value in settings:
        copy.setdefault(section, {})[name] = value
    return copy


def to_toml(document: Mapping[str, Mapping[str, Any]], comment: str = "") -> str:
    """A settings file: tables of texts, numbers, and true or false. `comment` comes first, a # before each line."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    for section, table in document.items():
        lines += [*([""] if lines else []), f"[{section}]", *(f"{name} = {_value(table[name])}" for name in table)]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str):
        raise SettingsError(f"{value!r} is no value of a setting")
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
