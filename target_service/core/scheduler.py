"""Which sequences run in the next step, and how many known tokens each feeds. Pure: no GPU, no gRPC, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from target_service.core.kv_cache import KVCache, OutOfPages
from target_service.core.sequence import Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step; the defaults live in `TargetConfig`."""

    max_running: int
    max_step_rows: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens that one sequence feeds in one step: `token_ids[kv_length : kv_length + count]`."""

    sequence: Sequence
    count: int

    @property
    def reaches_root(self) -> bool:
        """Whether the last row is the root, so that the step yields a token."""
        return self.sequence.kv_length + self.count == self.sequence.length

    @property
    def takes_tree(self) -> bool:
        """Whether the chunk is the root alone, so that drafted rows may follow."""
        return self.count == 1 and self.reaches_root


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: decoding sequences first, then prompts. Pages for every known token are held."""

    chunks: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class Scheduler:
    """Continuous batching: running sequences always go on, waiting ones join as KV pages and rows allow.

    Waiting sequences are taken round robin over tenants, first come first served within one. When pages run out
    one sequence gives its pages back and waits again; its tokens stay, and are fed anew. Sequences whose client
    has sent no tree go first, for they may idle as long as they like, then the youngest.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCache) -> None:
        self._config = config
        self._cache = cache
        self._waiting: dict[str, deque[Sequence]] = {}
        self.running: list[Sequence] = []
        # Rows of a step at most: what is configured, or less where that did not fit the device's memory.
        self.max_step_rows = config.max_step_rows

    def shrink(self) -> bool:
        """Halve the rows of a step, for good: they did not fit the device's memory. False if no less will do."""
        smallest = self.max_step_rows <= max(1, len(self.running))
        self.max_step_rows = max(1, self.max_step_rows // 2)
        return not smallest

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def load(self) -> int:
        """Sequences that run, or will as soon as their prompts are read."""
        return max(len(self.running), min(self._config.max_running, len(self.running) + self.waiting))

    @property
    def admits(self) -> bool:
        """Whether somebody waits, and a place is free."""
        return bool(self._waiting) and self._busy() < self._config.max_running

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence, running ones first."""
        yield from self.running
        for queue in self._waiting.values():
            yield from queue

    def add(self, sequence: Sequence) -> None:
        self._waiting.setdefault(sequence.request.tenant, deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget the sequence and give its pages back."""
        if sequence.state is SequenceState.WAITING:
            queue = self._waiting[sequence.request.tenant]
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.request.tenant]
        else:
            self.running.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Schedule:
        """The next step. Empty when nothing can run."""
        rows = self.max_step_rows
        chunks: list[Chunk] = []
        # Decoding first, so that long prompts cannot starve it.
        for sequence in sorted(self.running, key=lambda s: s.kv_length + 1 < s.length):
            if rows == 0 or len(chunks) == self._config.max_running or sequence.state is SequenceState.WAITING:
                # More than `max_running` have something to do where clients of idle ones sent their trees at once.
                continue
            count = min(self._due(sequence), rows)
            if count and self._hold(sequence, sequence.kv_length + count):
                chunks.append(Chunk(sequence, count))
                rows -= count
        # A sequence scheduled early in the loop may have been preempted for a later one.
        chunks = [chunk for chunk in chunks if chunk.sequence.state is not SequenceState.WAITING]
        self._admit(chunks, rows)
        return Schedule(tuple(chunks))

    def _due(self, sequence: Sequence) -> int:
        """Known tokens to feed next. A client that drafts feeds its root with its tree only."""
        known = sequence.length - sequence.kv_length
        if sequence.request.external:
            if known == 1:
                return 1 if sequence.external_tree is not None else 0
            known -= 1
        elif sequence.pending is not None:
            if sequence.full:
                # The step under way says its last token.
                return 0
            if known > 1:
                # An pending token is fed alone, once the others were.
                known -= 1
        return min(known, self._config.prefill_chunk)

    def _admit(self, chunks: list[Chunk], rows: int) -> None:
        while rows and self._waiting and max(len(chunks), self._busy()) < self._config.max_running:
            tenant, queue = next(iter(self._waiting.items()))
            sequence = queue[0]
            # A whole prompt and one page beyond it, so that a newcomer does not preempt the others at once.
            if self._cache.pages_for(len(sequence.token_ids)) + 1 > self._cache.free_pages and self.running:
                break
            queue.popleft()
            del self._waiting[tenant]
            if queue:
                # To the end of the round.
                self._waiting[tenant] = queue
            sequence.state = SequenceState.PREFILL
            self.running.append(sequence)
            count = min(self._due(sequence), rows)
            if count and self._hold(sequence, count):
                chunks.append(Chunk(sequence, count))
                rows -= count

    def _hold(self, sequence: Sequence, tokens: int) -> bool:
        """Hold pages for `tokens`, preempting younger sequences if need be. False when `sequence` lost its own."""
        while True:
            try:
                self.reserve(sequence, tokens)
                return True
            except OutOfPages:
                victim = self._victim()
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _busy(self) -> int:
        """Running sequences that a step would move on. The others hold pages, and no place."""
        return sum(not self._idle(sequence) for sequence in self.running)

    def _idle(self, sequence: Sequence) -> bool:
        """Whether the sequence waits for its client's tree."""
        return (
            sequence.request.external
            and sequence.kv_length + 1 == len(sequence.token_ids)
            and (sequence.external_tree is None)
        )

    def _victim(self) -> Sequence:
        """Who gives way: an idle sequence if there is one, else the youngest."""
        idle = (sequence for sequence in reversed(self.running) if self._idle(sequence))
        return next(idle, self.running[-1])

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Hold pages for `tokens` of the sequence, or raise `OutOfPages` and change nothing."""
        missing = self._cache.pages_for(tokens) - len(sequence.pages)
        if missing > 0:
            last = sequence.pages[-1] if sequence.pages else None
            sequence.pages.extend(self._cache.allocate(missing, after=last))

    def reserve_behind_trees(self, schedule: Schedule, max_context: int) -> bool:
        """Hold pages for what the step under way may accept besides the tokens that are laid out. False where some
        sequence has no room for it."""
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            if sequence.length + sequence.pending_drafts > max_context:
                return False
            try:
                self.reserve(sequence, sequence.kv_length + chunk.count + sequence.pending_drafts)
            except OutOfPages:
                return False
        return True

    def spare_rows(self, sequence: Sequence) -> int:
        """Rows past the known tokens that the sequence's pages and the free ones could take."""
        pages = len(sequence.pages) + self._cache.free_pages
        return pages * self._cache.page_size - sequence.length

    def trim(self, sequence: Sequence) -> None:
        """Give back pages that hold no committed token."""
        keep = self._cache.pages_for(len(sequence.token_ids))
        if len(sequence.pages) > keep:
            self._cache.release(sequence.pages[keep:])
            del sequence.pages[keep:]

    def _preempt(self, sequence: Sequence) -> None:
        idle = self._idle(sequence)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.totals.preemptions += 1
        tenant = sequence.request.tenant
        queue = self._waiting.pop(tenant, deque())
        if idle:
            queue.append(sequence)
            self._waiting[tenant] = queue
        else:
            # First in line: it was served before all that wait.
            queue.appendleft(sequence)
            self._waiting = {tenant: queue, **self._waiting}

    def _release(self, sequence: Sequence) -> None:
        self._cache.release(sequence.pages)
        del sequence.pages[:]
        sequence.kv_length = 0
