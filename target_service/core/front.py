"""Checks of requests and trees before they reach the engine, the same whether it runs in this process or another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

from outrider import errors
from outrider.errors import OutriderError
from outrider.tree import TokenTree
from target_service.core.sequence import SequenceEnd, SequenceEvent, SequenceFailed, SequenceRequest, StepVerdict


class EngineFront:
    """Checks requests and trees, assigns sequence ids, and tracks every sequence from submission to its last event.

    Attributes:
        failure: why the engine has failed; None while it has not.
        last_beat_ns: when its loop last ran, in monotonic nanoseconds.
    """

    def __init__(self, max_waiting: int, capacity: int = 0) -> None:
        """One sequence may have `capacity` tokens."""
        self._max_waiting = max_waiting
        self._capacity = capacity
        self._ids = itertools.count(1)
        self._update_ids = itertools.count(1)
        # The engine's own table lags behind by the commands under way.
        self._open: dict[int, SequenceRequest] = {}
        # The last committed token of sequences whose client drafts.
        self._roots: dict[int, int] = {}
        self._draining = False
        self.failure: BaseException | None = None
        self.last_beat_ns = time.monotonic_ns()

    def drain(self) -> None:
        """Refuse new requests; those under way continue."""
        self._draining = True

    def check_update(self, update_id: int | None = None) -> int:
        """The id of a new update of the weights: the one given, or the next. Raises `Draining` and `EngineDead`."""
        self._check_up()
        return next(self._update_ids) if update_id is None else update_id

    def check_tree(self, sequence_id: int, tree: TokenTree) -> None:
        """Check a client's tree. Raises `WrongRoot`, and `UnknownSequence` also where the client does not draft."""
        root = self._roots.get(sequence_id)
        if root is None:
            raise errors.UnknownSequence("the sequence is not open")
        if tree.token_ids[0] != root:
            raise errors.WrongRoot("the tree's root is not the last committed token")

    def _admit(self, request: SequenceRequest, not_waiting: int, sequence_id: int | None = None) -> int:
        """Check a request, and return its id: the one given, or the next. See `Engine.submit` for what it raises. Of
        the open sequences, `not_waiting` run, or wait for their client's tree."""
        self._check_up()
        needed = len(request.token_ids) + request.max_tokens
        if needed > self._capacity:
            raise errors.PositionOutOfRange("prompt and output do not fit", tokens=needed, capacity=self._capacity)
        waiting = len(self._open) - not_waiting
        # Clients that draft get half of the queue: their sequences may wait for a tree without end.
        if waiting >= (self._max_waiting // 2 if request.external else self._max_waiting):
            raise errors.QuotaExceeded("too many requests wait", waiting=waiting)
        return next(self._ids) if sequence_id is None else sequence_id

    def _check_up(self) -> None:
        if self.failure is not None:
            raise errors.EngineDead("the engine has failed")
        if self._draining:
            raise errors.Draining("the target is draining")

    def _add(self, sequence_id: int, request: SequenceRequest) -> None:
        """Register an open sequence, before the engine gets it."""
        self._open[sequence_id] = request
        if request.external:
            self._roots[sequence_id] = request.token_ids[-1]

    def _forget(self, sequence_id: int) -> SequenceRequest | None:
        """Remove a sequence that has ended. Returns its request, if it was open."""
        self._roots.pop(sequence_id, None)
        return self._open.pop(sequence_id, None)

    def _observe(self, events: Iterable[SequenceEvent]) -> None:
        """Update roots and remove ended sequences, before the events are delivered."""
        for event in events:
            if isinstance(event, StepVerdict):
                if event.sequence_id in self._roots:
                    self._roots[event.sequence_id] = event.token_ids[-1]
            elif isinstance(event, SequenceEnd):
                self._forget(event.sequence_id)

    def _failed(self, error: OutriderError) -> list[SequenceEvent]:
        """The last event of every sequence that is still open."""
        return [SequenceFailed(sequence_id, error) for sequence_id in list(self._open)]
