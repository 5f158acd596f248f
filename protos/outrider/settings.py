"""Settings: frozen dataclasses filled from flags, environment and a TOML file, each default in one place.

A settings class is a frozen dataclass whose fields are made with `setting(default, help)`; where they have bounds, it
inherits `Settings`. Precedence: flag, environment (`OUTRIDER_<SECTION>_<FIELD>`), the file's `[section]`, default.

    @dataclass(frozen=True)
    class DraftConfig(Settings):
        listen: str = setting("127.0.0.1:50052", "address to serve on")
        max_sequences: int = setting(1024, "open sequences", ge=1)

    parser = argparse.ArgumentParser()
    add_flags(parser, DraftConfig)
    config = load(DraftConfig, "draft", parser.parse_args(), os.environ, path)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import operator
import os
import sys
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from outrider.visible import visible

Config = TypeVar("Config")
logger = logging.getLogger(__name__)
# The environment variable with the settings file's path, for processes without --config.
CONFIG_VARIABLE = "OUTRIDER_CONFIG"
# Default bytes of the largest message that a service accepts.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Chosen, not measured: clients send their first message with the headers, and a slow network takes a second or two.
FIRST_MESSAGE_SECONDS = 10.0
# The flag that lists the rare settings too.
HELP_ALL = "--help-all"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
# By name of a bound: its words, and whether a number keeps it.
_BOUNDS = {"ge": ("at least", operator.ge), "gt": ("above", operator.gt), "le": ("at most", operator.le)}
# Drafters that come with Outrider: the draft service's own list, which this package may not import.
DRAFTERS = ("trie", "prompt_lookup", "eagle", "medusa", "mtp", "model", "merged", "assistant")
# Tables that a file may have: services and the command line share one file, and each reads its own tables. A table of
# another name is an error, since its settings would silently do nothing.
SECTIONS = frozenset(
    (
        *("target", "draft", "training", *DRAFTERS),
        # For a drafter MODULE:CLASS.
        "drafter",
        *("client", "generate", "bench", "tune", "up", "demo", "gateway"),
    )
)


class SettingsError(ValueError):
    """A setting that does not exist, does not parse or is out of bounds; the message names its source."""


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] = (),  # the allowed values; empty for any
    ge: float | None = None,  # a number must be at least this
    gt: float | None = None,  # a number must be above this
    le: float | None = None,  # a number must be at most this; without it a whole number must fit 64 bits with a sign
    deprecated: str = "",  # why it is not needed any more; it is accepted with a warning
    secret: bool = False,  # it gets no flag, since every user of a machine can read the flags of its processes
    rare: bool = False,  # few need it, so only --help-all lists it; what is deprecated is rare too
) -> Any:
    """A dataclass field with a help text."""
    metadata = {
        "help": help,
        "choices": choices,
        "bounds": {"ge": ge, "gt": gt, "le": le},
        "deprecated": deprecated,
        "secret": secret,
        "rare": rare or bool(deprecated),
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checks the bounds of numbers also where a program makes the settings without `load`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check_bounds(value, field.metadata["bounds"], "--" + field.name.replace("_", "-"))


@dataclasses.dataclass(frozen=True)
class ServerSettings(Settings):
    """Settings of services and gateways."""

    tls_certificate: str = setting("", "PEM certificate chain; plain text when empty")
    tls_key: str = setting("", "PEM private key")
    otlp_endpoint: str = setting("", "OTLP gRPC endpoint for traces; off when empty")
    trace_ratio: float = setting(1.0, "share of requests without a parent trace that are traced", ge=0, le=1)
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))


@dataclasses.dataclass(frozen=True)
class ServiceSettings(ServerSettings):
    """Settings that both services have."""

    metrics_listen: str = setting("", "HOST:PORT of the Prometheus endpoint; off when empty")
    # The most that gRPC can be configured for: its numbers have 32 bits.
    max_message_bytes: int = setting(MAX_MESSAGE_BYTES, "largest message accepted", ge=1024, le=2**31 - 1, rare=True)
    first_message_seconds: float = setting(
        FIRST_MESSAGE_SECONDS, "time that a stream has for its first message", gt=0, le=3600, rare=True
    )
    reflection: bool = setting(False, "serve gRPC reflection", rare=True)
    admin_listen: str = setting("", "loopback HOST:PORT for channelz; off when empty", rare=True)
    tls_client_ca: str = setting("", "PEM roots for client certificates; required of clients when set")


def _type_of(config: type[Any], name: str) -> tuple[type[Any], bool]:
    """The plain type of a field, and whether it may be None."""
    hint = typing.get_type_hints(config)[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return inner[0], True
    return hint, False


def _parse(config: type[Any], field: dataclasses.Field[Any], value: object, source: str) -> Any:
    kind, optional = _type_of(config, field.name)
    if value is None or (optional and value in ("", "none")):
        return None
    try:
        parsed = _convert(kind, value)
    except ValueError as error:
        raise SettingsError(f"{source}: {error}") from None
    choices = field.metadata["choices"]
    if choices and parsed not in choices:
        raise SettingsError(f"{source}: {parsed!r} is not one of {', '.join(map(str, choices))}")
    _check_bounds(parsed, field.metadata["bounds"], source)
    if field.metadata["deprecated"]:
        logger.warning("%s is deprecated: %s", source, field.metadata["deprecated"])
    return parsed


def _check_bounds(value: Any, bounds: Mapping[str, float | None], source: str) -> None:
    for name, (words, holds) in _BOUNDS.items():
        bound = bounds[name]
        # Written so that NaN fails.
        if bound is not None and not holds(value, bound):
            raise SettingsError(f"{source}: must be {words} {bound}")
    # What takes the number, such as a tensor or a message, has no more bits.
    if bounds["le"] is None and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SettingsError(f"{source}: must fit 64 bits with a sign")


def _convert(kind: type[Any], value: object) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"{value!r} is not true or false")
        return word in _TRUE
    if kind in (int, float):
        if isinstance(value, bool):
            raise ValueError(f"{value!r} is not a number")
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        # 1e400 in a file is infinite, and `int(2.5)` is 2.
        if not math.isfinite(number) or (isinstance(value, float) and number != value):
            raise ValueError(f"{value!r} is not {'a whole number' if kind is int else 'a number'}")
        return number
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


class CommandParser(argparse.ArgumentParser):
    """Reports an error in one line, with a pointer to the help. The full usage would fill the screen and hide the
    reason below it. The exit status is 2."""

    def print_help(self, file: Any = None) -> None:
        """Print the help, or raise what writing it does: argparse would hide it."""
        (sys.stdout if file is None else file).write(self.format_help())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but what follows `--..-flags` is its value, though it begins with a dash as flags do."""
        words = list(sys.argv[1:] if args is None else args)
        for place in reversed(range(len(words) - 1)):
            if words[place].startswith("--") and words[place].endswith("-flags"):
                words[place : place + 2] = ["=".join(words[place : place + 2])]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        # Names of files may come from others, by a pattern of the shell.
        message = visible(message)
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains the arguments.\n")


class _HelpAll(argparse.Action):
    """`HELP_ALL`: the help with the rare settings too."""

    def __init__(self, option_strings: list[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)
        self.rare: list[tuple[argparse.Action, str]] = []

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action, text in self.rare:
            action.help = text
        parser.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser, config: type[Any], but: Collection[str] = ()) -> None:
    """Add `--field-name` for every field, with its help and default, except secrets and names in `but`: inherited ones
    after the class's own. A flag that is not given sets no attribute. Where some are rare, `HELP_ALL` lists them, and
    `--help` does not."""
    rare: list[tuple[argparse.Action, str]] = []
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name not in config.__annotations__):
        if field.name in but or field.metadata["secret"]:
            continue
        flag, help_text = "--" + field.name.replace("_", "-"), _help_of(field).replace("%", "%%")
        kind, _ = _type_of(config, field.name)
        more: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind is not bool:
            more = {"metavar": "|".join(map(str, field.metadata["choices"])) or kind.__name__.upper()}
        action = parser.add_argument(flag, dest=field.name, default=argparse.SUPPRESS, help=help_text, **more)
        if field.metadata["rare"]:
            rare.append((action, help_text))
            action.help = argparse.SUPPRESS
    if rare:
        # Several classes may add their flags to one parser.
        listing = next((one for one in parser._actions if isinstance(one, _HelpAll)), None)
        listing = listing or typing.cast(_HelpAll, parser.add_argument(HELP_ALL, action=_HelpAll))
        listing.rare += rare
        listing.help = f"show {len(listing.rare)} more settings and exit"


def _help_of(field: dataclasses.Field[Any]) -> str:
    """The help text of a field: its meaning, deprecation, bounds and default."""
    note = f"; deprecated: {field.metadata['deprecated']}" if field.metadata["deprecated"] else ""
    given = {name: bound for name, bound in field.metadata["bounds"].items() if bound is not None}
    bounds = ", ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in given.items())
    if given.keys() >= {"ge", "le"}:
        bounds = f"{given['ge']} to {given['le']}"
    default = "none" if field.default is None else "empty" if field.default == "" else field.default
    return f"{field.metadata['help']}{note} ({f'{bounds}; ' if bounds else ''}default: {default})"


def load(
    config: type[Config],
    section: str,
    flags: argparse.Namespace | None = None,
    environment: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Config:
    """Build `config` from its sources. Raises `SettingsError` for unknown keys and values that do not parse."""
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in _file_section(path, section, fields).items():
        key = name.replace("-", "_")
        if key not in fields:
            raise SettingsError(f"{path}: [{section}] has no setting {name!r}; it has {', '.join(sorted(fields))}")
        values[key] = _parse(config, fields[key], value, f"{path}: {section}.{name}")
    prefix = f"OUTRIDER_{section.upper()}_"
    for variable, text in (environment or {}).items():
        if not variable.startswith(prefix):
            continue
        key = variable.removeprefix(prefix).lower()
        if key not in fields:
            raise SettingsError(f"{variable}: no such setting")
        values[key] = _parse(config, fields[key], text, variable)
    for name, value in vars(flags or argparse.Namespace()).items():
        if name in fields:
            values[name] = _parse(config, fields[name], value, "--" + name.replace("_", "-"))
    return config(**values)


def settings_file(flags: argparse.Namespace | None = None) -> Path | None:
    """The file that --config names, or the environment without it; None for no file."""
    name = getattr(flags, "config", None) or os.environ.get(CONFIG_VARIABLE)
    return Path(name) if name else None


def comma_words(text: str) -> tuple[str, ...]:
    """The words of a list with commas between them."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def unreadable(path: object, error: Exception) -> str:
    """Why a file cannot be read, in one line; `str` of an `OSError` would name the file a second time."""
    return f"{path}: {getattr(error, 'strerror', None) or error}"


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that a setting names. Raises `SettingsError` for one that cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(unreadable(path, error)) from None


def read_text(path: str | Path) -> str:
    """The text of a file that a setting names. Raises `SettingsError` for one that cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(unreadable(path, error)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises `SettingsError`."""
    try:
        return tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: {error}") from None


def json_lines(path: str | Path, text: str) -> Iterator[tuple[str, Any]]:
    """The value of each line of a JSONL file that is not blank, after where it stands. Raises `SettingsError`."""
    # Not by `splitlines`: JSON allows other line breaks inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{path}:{number}: {error}") from None


def _file_section(path: Path | None, section: str, fields: Collection[str]) -> Mapping[str, object]:
    """The section's table. Raises `SettingsError` also for errors elsewhere in the file, which might go unnoticed."""
    if path is None:
        return {}
    document = read_toml(path)
    stray = sorted(name for name, value in document.items() if not isinstance(value, dict | list) and name != section)
    if stray:
        known = stray[0].replace("-", "_") in fields
        belongs = f"it belongs below [{section}]" if known else f"there are {', '.join(sorted(SECTIONS))}"
        raise SettingsError(f"{path}: {stray[0]} stands outside of a table; {belongs}")
    if unknown := sorted(set(document) - SECTIONS - {section}):
        raise SettingsError(f"{path}: there is no table [{unknown[0]}]; there are {', '.join(sorted(SECTIONS))}")
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: [{section}] is not a table")
    return table
