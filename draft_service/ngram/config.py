"""Settings of the trie drafter, and the constants they turn into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draft_service.ngram.prediction import ESCAPE, MAX_SIBLINGS, PRECEDENCE, RECENCY, SOURCES, Evidence
from outrider.settings import Settings, SettingsError, setting
from outrider.tree import MAX_ROWS
from outrider.wire.frames import TreeLimits


@dataclass(frozen=True)
class TrieConfig(Settings):
    """Settings of the trie drafter: flags, environment (`OUTRIDER_TRIE_*`) or the `[trie]` table."""

    num_draft_tokens: int = setting(32, "nodes of a tree, the root not counted", ge=1, le=MAX_ROWS - 1)
    branch_length: int = setting(32, "longest path below the root", ge=1)
    breadth: int = setting(8, "most children of a node; 1 drafts a single branch", ge=1, le=MAX_ROWS - 1)
    max_match: int = setting(8, "longest context, in tokens; memory per token grows with it", le=32, ge=1)
    # Where the device chooses rows, one pass behind, trees with this floor make up to 1 % more tokens than with 0.01,
    # and take 33 us instead of 18 (`benchmarks/results/2026-11-25-cpu-table-sizes.md`).
    min_score: float = setting(0.001, "least probability of the path to a node that is worth sending", gt=0, le=1)

    learn_prompts: bool = setting(True, "teach prompts to the tenant's trie")
    learn_outputs: bool = setting(True, "teach committed output to the tenant's trie")

    capacity: int = setting(16_000_000, "nodes over all tenants and corpora, at about 50 bytes", ge=1, le=2**31 - 1)
    tenant_capacity: int = setting(4_000_000, "nodes of one tenant's trie; the least useful go first", ge=128)
    corpus_capacity: int = setting(8_000_000, "nodes of one shared corpus; past it, adding is refused", ge=128)
    own_tokens: int = setting(32_768, "latest tokens of a sequence that its own trie holds", ge=128)
    own_capacity: int = setting(
        16_000_000, "nodes over the own tries of all open sequences; past it, they forget", ge=128
    )
    # The clock of a sequence's own trie is never set back; no model has such a context.
    max_context: int = setting(131_072, "longest sequence followed, in tokens", ge=1, le=1 << 24)
    max_backlog: int = setting(1_000_000, "tokens that may wait to be inserted; past it, new ones are dropped", ge=0)

    snapshot: str = setting("", "folder to keep tries in across restarts; none when empty")
    snapshot_seconds: float = setting(300.0, "time between snapshots; one is also written at the end", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity < max(self.tenant_capacity, self.corpus_capacity):
            raise SettingsError("capacity must not be below tenant_capacity or corpus_capacity")

    @property
    def depth(self) -> int:
        """Tokens of the longest window: the longest context and what follows it."""
        return self.max_match + 1

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(self.num_draft_tokens, self.branch_length)

    def evidence(self) -> Evidence:
        """Weights of the sources: the sequence's own trie, its tenant's, and a shared corpus's.

        They were fitted together by random search with `benchmarks/drafters/draft_quality.py` on half of
        its traces, for tokens per step at 8 and 16 rows and with the rows that pay;
        benchmarks/results/2026-11-22-notes.md has those of the other half.
        """
        trust = np.zeros((SOURCES, ESCAPE + self.max_match + 1))
        # Extra occurrences of the most recent continuation.
        trust[:, RECENCY] = (1.1, 0.45, 0.0)
        # Tokens that are added to the match length of a source when sources compete.
        trust[:, PRECEDENCE] = (1.0, 0.0, 0.0)
        lengths = np.arange(1, self.max_match + 1)
        # Of unseen tokens after a context of so many tokens, in occurrences.
        for source, (scale, power, least) in enumerate(((2.8, 0.85, 0.02), (18.0, 1.7, 0.01), (18.0, 1.7, 0.01))):
            trust[source, ESCAPE + 1 :] = scale * lengths**-power + least
        # That weight grows with the number of different continuations to this power.
        spread = np.arange(1 + MAX_SIBLINGS, dtype=np.float64) ** 1.25
        return Evidence(trust, spread)
