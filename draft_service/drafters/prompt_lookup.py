"""Prompt lookup: copy what followed the last time that the sequence's latest tokens occurred in it.

The smallest useful drafter (Saxena, "Prompt lookup decoding", 2023), and the measure of what a trie adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import Drafter, DrafterSpec, DraftSequence, tree_limits
from outrider.settings import Settings, SettingsError, setting
from outrider.tree import MAX_ROWS, TokenTree
from outrider.wire.frames import TreeLimits


@dataclass(frozen=True)
class PromptLookupConfig(Settings):
    """Settings of prompt lookup: flags, environment (`OUTRIDER_PROMPT_LOOKUP_*`) or the `[prompt_lookup]` table."""

    lookup_tokens: int = setting(10, "tokens drafted, one after the other", ge=1, le=MAX_ROWS - 1)
    lookup_min: int = setting(2, "shortest run of tokens that is looked up", ge=1)
    lookup_max: int = setting(4, "longest run of tokens that is looked up", le=16, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookup_min > self.lookup_max:
            raise SettingsError("lookup_min must not be above lookup_max")


class PromptLookupDrafter(Drafter):
    """One chain per sequence, from the sequence's own tokens alone; a deterministic guess in every mode. A sequence's
    state is where each run of tokens was followed last: run -> position of the token after it."""

    name = "prompt_lookup"
    max_context = 131_072
    vocabulary_size = 0

    def __init__(self, config: PromptLookupConfig) -> None:
        self._config = config
        self.limits = TreeLimits(config.lookup_tokens, config.lookup_tokens)

    def open(self, sequence: DraftSequence) -> None:
        sequence.state = {}
        self._insert(sequence, 1)

    def advance(self, sequence: DraftSequence, committed: Sequence[int]) -> None:
        self._insert(sequence, len(sequence.token_ids) - len(committed))

    def close(self, sequence: DraftSequence) -> None:
        sequence.state = None

    def propose(self, sequences: Sequence[DraftSequence]) -> list[TokenTree]:
        return [self._chain(sequence) for sequence in sequences]

    def _insert(self, sequence: DraftSequence, begin: int) -> None:
        """Take in the runs that the tokens from `begin` on follow."""
        tokens, config = sequence.token_ids, self._config
        for end in range(begin, len(tokens)):
            for length in range(config.lookup_min, min(config.lookup_max, end) + 1):
                sequence.state[tuple(tokens[end - length : end])] = end

    def _chain(self, sequence: DraftSequence) -> TokenTree:
        tokens = sequence.token_ids
        limits = tree_limits(self.limits, sequence.limits)
        count = min(limits.max_nodes, limits.max_depth)
        for length in range(min(self._config.lookup_max, len(tokens)), self._config.lookup_min - 1, -1):
            begin = sequence.state.get(tuple(tokens[-length:]))
            if begin is not None:
                # A copy that reaches the end continues with itself, so that a repetition goes on.
                period = len(tokens) - begin
                copied = [tokens[begin + i % period] for i in range(count)]
                # A longer match is likelier to continue: m / (m + 1) after m tokens that agree.
                scores = ((length + i) / (length + i + 1) for i in range(len(copied)))
                return TokenTree((sequence.root, *copied), (0, *range(len(copied))), (1.0, *scores))
        return TokenTree.root_only(sequence.root)


SPEC = DrafterSpec("prompt_lookup", PromptLookupConfig, PromptLookupDrafter)
