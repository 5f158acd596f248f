"""How many passes are launched at once where neither the host nor a client needs their tokens in between."""

from __future__ import annotations

from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import MAX_PASSES, Sequence
from target_service.execution.batch import DeviceRows, keys_of

# A client gets the tokens of a launch together, and a new request waits for its end.
_LONGEST_SECONDS = 8e-3


class MultiStep:
    """Finds the smallest number of passes with which the device does not wait for its host.

    With many sequences and a small model a step takes longer on the host than on the device. Most of the host's work is
    done once for all passes that are launched together.
    """

    def __init__(self) -> None:
        self.passes = 1
        self._seen = 0
        self._seconds = self._working = 0.0

    def choose(
        self,
        schedule: Schedule,
        scheduler: Scheduler,
        max_context: int,
        device_rows: DeviceRows | None,
        *,
        several: bool,
    ) -> tuple[int, DeviceRows | None]:
        """Passes to launch at once, one unless there may be `several`, and `device_rows`; None where there
        are too few pages."""
        for passes in (self.passes, 1) if several else (1,):
            if _have_pages(schedule, scheduler, max_context, passes, device_rows):
                return passes, device_rows
        return 1, None

    def observe_launch(self, passes: int, seconds: float, waited: float) -> None:
        """`passes` that were launched while others ran took `seconds` from the end of those; the host `waited` for
        some of these seconds."""
        if passes != self.passes:
            # Launched before the last change.
            return
        self._seen += 1
        self._seconds += seconds
        self._working += seconds - waited
        # Measured between two changes.
        if self._seen < 8:
            return
        busy, each = self._working / self._seconds, self._seconds / self._seen
        self._seen, self._seconds, self._working = 0, 0.0, 0.0
        # Shares of the time that the host works. Above the first, a launch waits for the host; below the second, it
        # would not with half as many passes either.
        if busy > 0.85 and 2 * passes <= MAX_PASSES and 2 * each <= _LONGEST_SECONDS:
            self.passes *= 2
        elif passes > 1 and (busy < 0.35 or each > _LONGEST_SECONDS):
            self.passes //= 2


def _have_pages(
    schedule: Schedule, scheduler: Scheduler, max_context: int, passes: int, device_rows: DeviceRows | None
) -> bool:
    """Reserve pages for `passes`. False where there are too few, or a sequence would become too long."""
    if passes == 1 and device_rows is None:
        return True
    laid_out = device_rows.laid_out if device_rows is not None and passes == 1 else 0
    # Those come first, and have their pages.
    chunks = schedule.chunks[laid_out:]
    limits = device_rows.most[laid_out:] if device_rows is not None else (None,) * len(chunks)
    tail = device_rows.tail if device_rows is not None else 0
    tokens: list[tuple[Sequence, int]] = []
    for chunk, limit in zip(chunks, limits, strict=True):
        sequence = chunk.sequence
        more = sequence.pending_drafts + keys_of(1, passes, limit, tail)
        if not chunk.takes_tree or sequence.length + more > max_context:
            return False
        tokens.append((sequence, sequence.kv_length + more))
    return scheduler.pages.reserve_for_drafts(tokens, scheduler.running)
