"""The flags of `outrider draft`: those of the service, and of its drafter and the drafter's parts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from draft_service.config import DraftConfig, drafter_config
from draft_service.drafters.base import drafter_spec
from outrider.settings import SettingsError, add_flags


def add_drafter_flags(parser: argparse.ArgumentParser, words: Sequence[str], drafter: str, path: Path | None) -> None:
    """Add the flags of a drafter and of its parts. A flag that several of them have is for each of them.

    Args:
        words: the command line, which may name the parts.
        path: the configuration file, which may name them too.
    """
    spec = drafter_spec(drafter)
    add_flags(parser, spec.config)
    known, _ = parser.parse_known_args(words)
    added = {field.name for field in fields(spec.config)}
    for part in spec.parts(drafter_config(drafter, known, os.environ, path)):
        config = drafter_spec(part).config
        add_flags(parser, config, added)
        added |= {field.name for field in fields(config)}


def flags_in_process(drafter: str, words: Sequence[str], path: Path | None) -> argparse.Namespace:
    """The flags of a drafter in the target's process. Those of the service are taken too, and have no effect there.

    Raises `SettingsError` for flags that `outrider draft` would refuse, `NotSupported` for a drafter that is not there.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, DraftConfig)
    add_drafter_flags(parser, words, drafter, path)
    return parser.parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Raises what would end the process, which is the target's."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)
