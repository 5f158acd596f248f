"""The schedule of one step: its sequences, and how many known tokens each feeds."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

from target_service.core.sequence import Sequence


@dataclass(slots=True)
class SequenceChunk:
    """Known tokens that one sequence feeds in one step: `token_ids[kv_length : kv_length + count]`.

    Attributes:
        reaches_root: the last row is the root, so that the step yields a token.
        takes_tree: the chunk is the root alone, so that drafted rows may follow.
    """

    sequence: Sequence
    count: int
    # As the sequence is when the chunk is made: a step asks several times for each of its sequences.
    reaches_root: bool = field(init=False)
    takes_tree: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reaches_root = self.sequence.kv_length + self.count == self.sequence.length
        self.takes_tree = self.count == 1 and self.reaches_root


@dataclass(frozen=True)
class Schedule:
    """One step: sequences that read come first, then those that feed their root alone and may have drafted rows, of
    these first the ones whose rows the host chooses. Pages for every known token are reserved."""

    chunks: tuple[SequenceChunk, ...] = ()
    # Only one tenant has had sequences in recent steps, or has this step alone so that its time can be measured.
    own: bool = True

    @property
    def rows(self) -> int:
        """Rows of known tokens."""
        return sum(chunk.count for chunk in self.chunks)

    @cached_property
    def prefilling(self) -> int:
        return sum([not chunk.takes_tree for chunk in self.chunks])

    @cached_property
    def laid_out(self) -> int:
        """Sequences for which the device cannot choose rows."""
        return sum([not (chunk.takes_tree and chunk.sequence.request.device_rows) for chunk in self.chunks])

    @property
    def prefill_rows(self) -> int:
        """Rows of the sequences that read."""
        return sum([chunk.count for chunk in self.chunks[: self.prefilling]])


def place_in_step(chunk: SequenceChunk) -> tuple[bool, bool]:
    """The key that brings the chunks of a step in the order of `Schedule`."""
    return chunk.takes_tree, chunk.takes_tree and chunk.sequence.request.device_rows


def rows_that_fill(read: int, beside: int, sizes: SequenceOf[int]) -> int:
    """Of `read` rows of prompts as many as fill one of the `sizes` of captured passes with the `beside` rows of others:
    a pass runs as the next larger size, so the others would take as long as rows that are read. All where no size holds
    half of them, and without `sizes` [any], which rise."""
    place = bisect.bisect_right(sizes, beside + read)
    filled = sizes[place - 1] - beside if place else 0
    return filled if 2 * filled >= read else read
