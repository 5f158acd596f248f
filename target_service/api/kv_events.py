"""KV events: which shared pages came and went, for routers that send a text where its beginning was read.

Of the shape that routers know from vLLM: chained hashes, tokens, a parent, numbered batches that can be replayed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from outrider.errors import PositionOutOfRange
from outrider.v1 import target_pb2 as pb
from target_service.core.events import EngineObserver
from target_service.core.sequence import SequenceRequest, SequenceTotals, StepStats
from tree_kernels.prefix_tree import PageChange

logger = logging.getLogger(__name__)


# Pages of one message of a snapshot. Chosen: less than the 4 MiB that clients of gRPC take by default, with pages of 64
# tokens and five bytes a token.
_SNAPSHOT_PAGES = 8192
_NOT_KEPT = "events of that batch are not kept any more"


class KvEventLog:
    """The newest batches of changes, what is shared by them, and who waits for the next. Belongs to the event loop."""

    def __init__(self, kept: int, page_size: int) -> None:
        """`kept`: batches that may be replayed."""
        self._page_size = page_size
        self._batches: deque[pb.SubscribeKvEventsResponse] = deque(maxlen=kept)
        self._last = 0
        # By hash, every page behind the one that its text has before it.
        self._shared: dict[int, PageChange] = {}
        self._came = asyncio.Event()

    def append(self, changes: list[PageChange]) -> None:
        """Add what changed in one step."""
        self._last += 1
        for one in changes:
            if one.inserted:
                self._shared[one.hash] = one
            elif one.hash:
                del self._shared[one.hash]
            else:
                self._shared.clear()
        events = _events(changes, self._page_size)
        batch = pb.SubscribeKvEventsResponse(sequence=self._last, timestamp_ns=time.time_ns(), events=events)
        self._batches.append(batch)
        # Tasks that wait have this event; the next ones wait for a new one.
        self._came.set()
        self._came = asyncio.Event()

    async def follow(
        self, from_sequence: int, *, snapshot: bool = False
    ) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        """Batches from this one on, 0 for the next, behind one that is empty. Never ends. Where a batch is not kept any
        more, or comes after the next, and with 0, all that is shared is sent first if `snapshot` asks for it; else
        `PositionOutOfRange` is raised."""
        following, first = from_sequence or self._last + 1, self._last + 1 - len(self._batches)
        whole = snapshot and not (from_sequence and first <= following <= self._last + 1)
        if not whole:
            if following > self._last + 1:
                raise PositionOutOfRange("that batch is still to come", next=self._last + 1)
            if following < first:
                raise PositionOutOfRange(_NOT_KEPT, oldest=first)
            yield pb.SubscribeKvEventsResponse(sequence=following - 1, timestamp_ns=time.time_ns())
        while True:
            came, oldest = self._came, self._last + 1 - len(self._batches)
            if whole or following < oldest:
                if not snapshot:
                    raise PositionOutOfRange(_NOT_KEPT, oldest=oldest)
                whole, following = False, self._last + 1
                for batch in self._snapshot():
                    yield batch
                continue
            for batch in list(itertools.islice(self._batches, following - oldest, None)):
                yield batch
                following = batch.sequence + 1
            if following > self._last:
                await came.wait()

    def _snapshot(self) -> list[pb.SubscribeKvEventsResponse]:
        """All pages that are shared now, behind the order to forget others."""
        pages, now = list(self._shared.values()), time.time_ns()
        parts = [pages[start : start + _SNAPSHOT_PAGES] for start in range(0, len(pages), _SNAPSHOT_PAGES)]
        return [
            pb.SubscribeKvEventsResponse(sequence=self._last, timestamp_ns=now, events=_events(part, self._page_size))
            for part in ([PageChange(0), *(parts[0] if parts else ())], *parts[1:])
        ]


class PagesFollower:
    """An `EngineObserver` that adds what changes to a log, beside what another observer does."""

    def __init__(self, log: KvEventLog, inner: EngineObserver | None) -> None:
        """Made on the event loop; its methods may be called in the engine's thread."""
        self._log, self._inner, self._loop = log, inner, asyncio.get_running_loop()

    def on_pages(self, changes: list[PageChange]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._log.append, changes)
        except RuntimeError:
            # The loop closes only after every call has ended.
            logger.debug("KV events after the event loop's end")

    def on_step(self, stats: StepStats) -> None:
        if self._inner is not None:
            self._inner.on_step(stats)

    def on_finished(self, sequence_id: int, request: SequenceRequest, totals: SequenceTotals, outcome: str) -> None:
        if self._inner is not None:
            self._inner.on_finished(sequence_id, request, totals, outcome)

    def on_speculation(self, active: bool) -> None:
        if self._inner is not None:
            self._inner.on_speculation(active)


class _Kind(NamedTuple):
    """Changes of the same kind that follow each other share an event."""

    cleared: bool
    inserted: bool
    tenant: str


def _events(changes: list[PageChange], page_size: int) -> list[pb.KvEvent]:
    events: list[pb.KvEvent] = []
    for kind, alike in itertools.groupby(changes, lambda one: _Kind(not one.hash, one.inserted, one.tenant)):
        if kind.cleared:
            events.append(pb.KvEvent(cleared=pb.AllBlocksCleared()))
        elif kind.inserted:
            events += [pb.KvEvent(stored=_stored(chain, page_size)) for chain in _chains(list(alike))]
        else:
            events.append(pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=[one.hash for one in alike])))
    return events


def _chains(inserted: list[PageChange]) -> list[list[PageChange]]:
    """In pieces of which every page is behind the one before it."""
    chains: list[list[PageChange]] = []
    for one in inserted:
        if chains and chains[-1][-1].hash == one.parent:
            chains[-1].append(one)
        else:
            chains.append([one])
    return chains


def _stored(chain: list[PageChange], page_size: int) -> pb.BlocksStored:
    first, tokens = chain[0], array("i", b"".join([one.tokens for one in chain]))
    return pb.BlocksStored(
        block_hashes=[one.hash for one in chain],
        parent_block_hash=first.parent or None,
        token_ids=tokens,
        block_size=page_size,
        tenant=first.tenant,
    )
