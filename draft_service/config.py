"""Settings of the draft service, and the flags of `outrider draft`: its own, and those of its drafter and its parts.

Each default lives here, or with those of both services in `outrider.settings`; a drafter's own are in its own section.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from draft_service.drafters.base import DRAFTERS, drafter_spec
from outrider.busy_polling import BUSY_POLL_SECONDS, MOST_BUSY_POLL_SECONDS
from outrider.settings import HELP_ALL, ServiceSettings, SettingsError, add_flags, load, setting, settings_file


@dataclass(frozen=True)
class DraftConfig(ServiceSettings):
    """Everything `python -m draft_service` takes, by flag, environment (`OUTRIDER_DRAFT_*`) or `[draft]` table."""

    listen: str = setting("127.0.0.1:50052", "address to serve on: HOST:PORT or unix:PATH")

    drafter: str = setting("trie", f"drafter: {', '.join(DRAFTERS)}, or MODULE:CLASS of your own")
    vocabulary_size: int = setting(0, "vocabulary that targets must have; 0 takes any", ge=0)
    tokenizer_fingerprint: str = setting(
        "", "SHA-256 of the tokenizer that targets must have; empty takes that of the drafter's head, or any"
    )
    max_sequences: int = setting(1024, "open sequences, over all streams; more are refused", ge=1)

    busy_poll_ms: float = setting(
        BUSY_POLL_SECONDS * 1e3,
        "with a drafter on a GPU and 8 cores or more, how long the service polls for the next commit after each before "
        "it sleeps; a core is busy meanwhile",
        ge=0,
        le=MOST_BUSY_POLL_SECONDS * 1e3,
    )
    drain_seconds: float = setting(5.0, "time open sequences get after SIGTERM", ge=0)
    auth_tokens: str = setting("", "file of `TOKEN TENANT` lines; callers without a token are refused when set")
    trusted_tenant: str = setting("target", "tenant whose token may open sequences of every tenant")


def drafter_config(
    name: str,
    flags: argparse.Namespace | None = None,
    environment: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Any:
    """The settings of a drafter, from its own section of the same sources. Raises `NotSupported` for a drafter that is
    not there, `SettingsError` for settings it does not have."""
    spec = drafter_spec(name)
    return load(spec.config, spec.name, flags, environment, path)


def add_drafter_flags(parser: argparse.ArgumentParser, words: Sequence[str], drafter: str, path: Path | None) -> None:
    """Add the flags of a drafter and of its parts, which the command line's `words` or the configuration file at `path`
    may name. A flag that several of them have is for each of them."""
    spec = drafter_spec(drafter)
    add_flags(parser, spec.config)
    known, _ = parser.parse_known_args(words)
    added = {field.name for field in fields(spec.config)}
    for part in spec.parts(drafter_config(drafter, known, os.environ, path)):
        config = drafter_spec(part).config
        add_flags(parser, config, added)
        added |= {field.name for field in fields(config)}


def named_in_target(argument: str) -> tuple[str, Callable[[str], Any]]:
    """A drafter in the target's process, and what returns the settings of any drafter by name, of `argument`: its name,
    with flags of `outrider draft` behind it, quoted as in a shell. Flags of the service are taken too, and have no
    effect. Other settings come from the environment and the file of `OUTRIDER_CONFIG`, as for the service.

    Raises `SettingsError` for flags that `outrider draft` would refuse, and `NotSupported` for a drafter that is not
    there."""
    path = settings_file()
    try:
        name, *words = shlex.split(argument)
    except ValueError as error:
        raise SettingsError(f"expected a drafter and its flags: {error}") from None
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, DraftConfig)
    add_drafter_flags(parser, words, name, path)
    return name, partial(drafter_config, flags=parser.parse_args(words), environment=os.environ, path=path)


class _Parser(argparse.ArgumentParser):
    """Raises what would end the process, which is the target's."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002
        raise SettingsError(f"{HELP_ALL} is for `outrider draft`")
