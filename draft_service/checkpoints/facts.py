"""What heads of every kind have in common, and what is read of their config.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.heads import HeadRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape(ABC):
    """The configuration that heads of every kind share, in one form for every checkpoint layout."""

    vocab_size: int  # of the target, whose token ids the head reads
    draft_vocab_size: int  # number of tokens that the head can draft
    target_hidden_size: int  # width of one of the target's hidden states
    target: str = ""  # name or folder of the target it was made for; empty when unknown
    tokenizer_fingerprint: str = ""  # of the target's tokenizer; empty when unknown

    @abstractmethod
    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The layers whose outputs the head reads, in a target with this many layers; counted as in `FeatureRequest`.
        Raises `HeadRefused` for layers that the target does not have."""


def same_tokenizer(*fingerprints: str) -> bool:
    """Whether all known (non-empty) fingerprints are equal."""
    return len(set(fingerprints) - {""}) <= 1


def number_of(config: Mapping[str, Any], name: str) -> int:
    """A required entry of a config.json. Raises `HeadRefused` if it is missing."""
    if config.get(name) is None:
        raise HeadRefused(f"config.json has no {name}")
    return int(config[name])


def architectures_of(config: Mapping[str, Any]) -> str:
    """The architectures of a config.json, for a message."""
    return ", ".join(map(str, config.get("architectures") or ())) or "no architecture"
