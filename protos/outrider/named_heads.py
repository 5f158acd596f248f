"""Which head a drafter runs, from the flags and settings that it is given: its target has to know it too."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from outrider.settings import SettingsError, comma_words, read_toml

# Values by (section, setting).
NamedSettings = Mapping[tuple[str, str], str]
# Drafters that need a head: an EAGLE head, Medusa's, or the target's own MTP module.
WITH_HEAD = ("eagle", "medusa", "merged", "mtp")


def named_settings(environment: Mapping[str, str], path: Path | None) -> dict[tuple[str, str], str]:
    """Values that environment and configuration file give to services and drafters. A file that cannot be read gives
    none: the services report what is wrong with it."""
    document: dict[str, Any] = {}
    if path is not None:
        with contextlib.suppress(SettingsError):
            document = read_toml(path)
    found: dict[tuple[str, str], str] = {}
    for section in ("target", "draft", "eagle", "medusa", "model", "mtp", "merged", "assistant", "gateway"):
        prefix = f"OUTRIDER_{section.upper()}_"
        table = document.get(section, {})
        found |= {(section, name): str(value) for name, value in (table if isinstance(table, dict) else {}).items()}
        given = {name: value for name, value in environment.items() if name.startswith(prefix)}
        found |= {(section, name.removeprefix(prefix).lower()): value for name, value in given.items()}
    return found


def merged_drafters(words: Sequence[str], named: NamedSettings) -> tuple[str, ...]:
    """The parts of the drafter `merged`: of the draft's flags, named elsewhere, or the default's."""
    flag = flag_value(words, "--merged-drafters")
    # The default of the draft's own setting, which cannot be imported here.
    return comma_words(flag or named.get(("merged", "merged_drafters"), "") or "eagle,trie")


def head_setting(names: Set[str]) -> tuple[str, tuple[str, str]]:
    """The flag and the setting that name the head of these drafters."""
    if "mtp" in names:
        return "--base-model", ("mtp", "base_model")
    return "--head", ("medusa" if "medusa" in names else "eagle", "head")


def head_in_process(draft: str, named: NamedSettings) -> str:
    """The head that `draft`, a drafter in the target's process with its flags, is set to run; empty for none."""
    try:
        drafter, *words = shlex.split(draft)
    except ValueError:
        # The draft itself refuses it.
        return ""
    if drafter not in WITH_HEAD:
        return ""
    flag, setting = head_setting({drafter, *(merged_drafters(words, named) if drafter == "merged" else ())})
    return flag_value(words, flag) or named.get(setting, "")


def flag_value(words: Sequence[str], flag: str) -> str | None:
    """The value of a flag such as "--device" in a command line, as `--device X` or `--device=X`; None without it. Of
    several the last, as everywhere."""
    found = None
    for at, word in enumerate(words):
        if word == flag:
            found = "".join(words[at + 1 : at + 2])
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
