"""Facts about heads and targets, and the check whether a head was made for a target."""

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


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts from a target's config.json, and its tokenizer's fingerprint, empty when unknown."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    tokenizer_fingerprint: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], tokenizer_fingerprint: str = "") -> TargetFacts:
        """Read the entries of a transformers config.json. Raises `HeadRefused` if one is missing."""
        text: Mapping[str, Any] = config.get("text_config") or config
        try:
            sizes = int(text["vocab_size"]), int(text["hidden_size"]), int(text["num_hidden_layers"])
        except KeyError as missing:
            raise HeadRefused(f"the target's config.json has no {missing}") from None
        return cls(*sizes, tokenizer_fingerprint)


def check_fits(head: HeadShape, target: TargetFacts) -> None:
    """Raise `HeadRefused` unless the head was made for a target like this one."""
    if head.vocab_size != target.vocab_size:
        raise HeadRefused(f"the head has a vocabulary of {head.vocab_size}, the target one of {target.vocab_size}")
    if head.target_hidden_size != target.hidden_size:
        raise HeadRefused(
            f"the head reads hidden states of width {head.target_hidden_size}, the target's have {target.hidden_size}"
        )
    head.layers_of(target.num_layers)
    if not same_tokenizer(head.tokenizer_fingerprint, target.tokenizer_fingerprint):
        raise HeadRefused("the head was made for another tokenizer")


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
