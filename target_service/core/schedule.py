"""The schedule of one step: its sequences, how many known tokens each feeds, and how many rows go to prompts."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cached_property

from target_service.core.sequence import Sequence
from target_service.core.step_times import StepTimes

# Rows of prompts that every step reads, however long steps are, so that prompts make progress. Chosen.
LEAST_READ = 16


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
    these first the ones whose rows the host chooses. Of each kind, those of a group stand side by side, see
    `Sequence.common_page`. Pages for every known token are reserved."""

    chunks: tuple[SequenceChunk, ...] = ()
    # Only one tenant has had sequences in recent steps, or has this step alone so that its time can be measured.
    own: bool = True
    # Known tokens that it leaves unread.
    unread: int = 0

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


def place_in_step(chunk: SequenceChunk) -> tuple[bool, bool, int]:
    """The key that brings the chunks of a step in the order of `Schedule`."""
    sequence = chunk.sequence
    return chunk.takes_tree, chunk.takes_tree and sequence.request.device_rows, sequence.common_page


def rows_that_fill(read: int, beside: int, sizes: SequenceOf[int]) -> int:
    """Of `read` rows of prompts as many as fill one of the `sizes` of captured passes with the `beside` rows of others:
    a pass runs as the next larger size, so the others would take as long as rows that are read. All where no size holds
    half of them, and without `sizes` [any], which rise."""
    place = bisect.bisect_right(sizes, beside + read)
    filled = sizes[place - 1] - beside if place else 0
    return filled if 2 * filled >= read else read


class PromptRows:
    """How many rows of prompts a step reads."""

    def __init__(
        self,
        waits: tuple[float, float],
        chunk_rows: int,
        pass_sizes: Callable[[int], SequenceOf[int]],
        times: StepTimes,
    ) -> None:
        """`waits`: seconds that decoding sequences may wait for a step that reads, usually and where they are few.
        `chunk_rows`: most rows of a sequence. `pass_sizes` are those of the runner, see
        `ModelRunner.pass_sizes`."""
        self._waits, self._chunk_rows = waits, chunk_rows
        self._pass_sizes, self._times = pass_sizes, times
        # Drafted rows of the last step that only decoded.
        self._drafted = 0
        # Those of a step of so many sequences that decode, and so many rows, which leaves prompts unread.
        self.drafted_beside: Callable[[int, int], int] = lambda *_: self._drafted

    def observe_drafted(self, schedule: Schedule, rows: int) -> None:
        """Observe a step that was launched with `rows` for its roots and drafts, or with its roots alone."""
        if not schedule.prefilling:
            self._drafted = max(0, rows - len(schedule.chunks))

    def choose(self, due: SequenceOf[int], decoding: int, rows: int) -> int:
        """Rows of a step, of at most `rows`: those that the sequences that it decodes may wait for. If some are left
        for the next step anyway, the step has one of the sizes that passes are captured for, with as many drafted rows
        as are worth it. `due` are those of each sequence that reads."""
        if not due:
            return rows
        read, beside, sizes = sum(due), decoding, self._pass_sizes(decoding + len(due))
        if decoding:
            longest = self._longest_wait(decoding)
            whole = decoding + self._times.prefill_within(decoding, longest, rows)
            beside += (drafted := self.drafted_beside(decoding, rows_that_fill(whole, 0, sizes)))
            within = max(LEAST_READ, self._times.prefill_within(decoding, longest, rows, drafted))
            rows = min(rows, rows_that_fill(within, beside, sizes))
        if read <= rows and max(due) < self._chunk_rows:
            return rows
        return rows_that_fill(min(rows, read), beside, sizes)

    def _longest_wait(self, decoding: int) -> float:
        """Seconds that a step may take which reads prompts beside decoding sequences."""
        usual, most = self._waits
        # Decoding sequences that wait for steps of the usual length; fewer wait for longer ones, all together for as
        # long. Chosen, in a simulation: with 12 first tokens come later, and with 24 no sooner
        # (`benchmarks/results/2026-11-29-cpu-first-tokens.md`).
        longest = max(usual, min(most, usual * 16 / decoding))
        # How much longer than one without prompts a step may be that reads some, whatever the bound of waits. Chosen:
        # where decoding alone takes that long, prompts have as much time as it.
        return max(longest, 2.0 * self._times.decoding_seconds(decoding, self._drafted))
