"""Settings to try: shapes of drafted trees, and how many of their rows the target verifies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.settings import SECTIONS, SettingsError

# Each request can bound its verified rows, so that a running target can be measured with another bound.
TARGET, MAX_DRAFT_NODES = "target", "max_draft_nodes"
DEFAULT_LABEL = "default"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings that differ from those in force, each as (section, name, value); without any, the settings in force."""

    settings: tuple[tuple[str, str, int], ...] = ()

    @property
    def label(self) -> str:
        """In the form that `parse_candidates` reads."""
        return " ".join(f"{section}.{name}={value}" for section, name, value in self.settings) or DEFAULT_LABEL

    @property
    def draft(self) -> tuple[tuple[str, str, int], ...]:
        """The settings that the draft service reads."""
        return tuple(one for one in self.settings if one[0] != TARGET)

    @property
    def max_nodes(self) -> int | None:
        """The most drafted rows of a sequence to verify; None leaves that to the target."""
        return next((value for section, _, value in self.settings if section == TARGET), None)


def _shapes(section: str, names: Sequence[str], rows: Iterable[Sequence[int]]) -> tuple[Candidate, ...]:
    return tuple(Candidate(tuple((section, *one) for one in zip(names, row, strict=True))) for row in rows)


# Around the defaults, the likeliest first, since there may be no time for all: smaller and larger trees, deeper and
# wider ones, and a chain. Chosen, not measured: measuring is what tuning is for.
_LEVELS = ("num_steps", "topk", "frontier", "num_draft_tokens")
# Beside 3, 4, 4, 12.
_EAGER_SHAPES = ((2, 4, 4, 8), (4, 4, 4, 16), (3, 8, 8, 24), (3, 1, 1, 3), (2, 2, 2, 4), (5, 4, 8, 32), (5, 1, 1, 5))
# Beside 8, 8, 32, 239; a level adds as many nodes as it expands.
_CAPTURED_SHAPES = ((6, 8, 32, 175), (8, 8, 16, 127), (4, 8, 32, 111), (6, 8, 16, 95), (4, 8, 16, 63), (5, 4, 8, 39))
_OWN = {
    # Beside 32 nodes, paths of 32, 8 children.
    "trie": (
        *_shapes("trie", ("num_draft_tokens",), ((16,), (63,), (8,))),
        *_shapes("trie", ("num_draft_tokens", "breadth"), ((16, 1), (8, 1), (16, 3))),
        *_shapes("trie", ("branch_length",), ((8,),)),
    ),
    # Beside 10.
    "prompt_lookup": _shapes("prompt_lookup", ("lookup_tokens",), ((5,), (15,), (3,))),
    # Beside 63 nodes, 10 children.
    "medusa": _shapes("medusa", ("num_draft_tokens", "topk"), ((31, 10), (15, 5), (15, 10), (7, 3))),
}


def known_candidates(drafter: str, parts: Sequence[str] = (), captured: bool = False) -> list[Candidate]:
    """Candidates for a drafter, the likeliest first; for `merged`, those of its `parts` in turn. `captured`: trees are
    drafted in CUDA graphs, whose defaults are larger."""
    # Beside 63, in the order of trying.
    verified = _shapes(TARGET, (MAX_DRAFT_NODES,), [(rows,) for rows in (15, 31, 7)])
    columns = [_shapes_of(name, captured) for name in (parts if drafter == "merged" else (drafter,))]
    return [one for row in zip_longest(*columns, verified) for one in row if one is not None]


def _shapes_of(drafter: str, captured: bool) -> tuple[Candidate, ...]:
    if drafter in ("assistant", "eagle", "model", "mtp"):
        return _shapes(drafter, _LEVELS, _CAPTURED_SHAPES if captured else _EAGER_SHAPES)
    return _OWN.get(drafter, ())


def parse_candidates(text: str) -> list[Candidate]:
    """Candidates as a user writes them: `trie.breadth=1 trie.num_draft_tokens=16; target.max_draft_nodes=15`. Raises
    `SettingsError` for anything else. Only the service checks whether it has such a setting."""
    return list(dict.fromkeys(_candidate(words.split()) for words in text.split(";") if words.strip()))


def _candidate(words: Sequence[str]) -> Candidate:
    settings: dict[tuple[str, str], int] = {}
    for word in words:
        match = re.fullmatch(r"(?P<section>[a-z_]+)\.(?P<name>[a-z0-9_-]+)=(?P<value>\d+)", word)
        if match is None:
            raise SettingsError(f"--candidates: {word!r} is not SECTION.NAME=NUMBER")
        section, name = match["section"], match["name"].replace("-", "_")
        if section not in SECTIONS:
            raise SettingsError(f"--candidates: there is no section {section!r}")
        if section == TARGET and name != MAX_DRAFT_NODES:
            raise SettingsError(f"--candidates: of the target, {MAX_DRAFT_NODES} alone can be tried")
        settings[section, name] = int(match["value"])
    return Candidate(tuple((section, name, value) for (section, name), value in settings.items()))
