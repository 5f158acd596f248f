"""A draft link without a network: the same session and drafters, in the target's own process.

For a machine with no process to spare, and as the baseline for the cost of a separate draft process. Growth of a
drafter on the CPU is delivered inside the call that causes it, growth of one on a GPU from its own thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from draft_service.compiling import LOOPS
from draft_service.config import DraftConfig, named_in_target
from draft_service.drafters.base import Drafter, create, device_of, fingerprint_of, info_of, loops_of
from draft_service.faults import DrafterFailed, FaultLog, text_of
from draft_service.session import ProposeSession, SequenceAdmission
from outrider.drafting.events import Connected, Disconnected, DraftEvents, Grown, Opened, SequenceFailure
from outrider.errors import DraftUnavailable, WrongVocabulary
from outrider.wire.frames import DEFAULT_TENANT, OpenSequence, SequenceAdvance, SequenceFeatures

logger = logging.getLogger(__name__)

Part = TypeVar("Part", OpenSequence, SequenceAdvance, SequenceFeatures)


def connect(argument: str) -> Callable[[DraftEvents, int, str], InprocessLink]:
    """Make the drafter that `argument` names, see `named_in_target`. Returns a function that starts it and links it,
    once, given a target's events, vocabulary size and tokenizer fingerprint, which are known when the target's model is
    loaded.

    Raises `NotSupported` or `SettingsError`; the function also raises `WrongVocabulary`: unlike for a service, which
    may be replaced, a mismatch is the operator's mistake here.
    """
    return partial(link_to, create(*named_in_target(argument)))


def link_to(drafter: Drafter, events: DraftEvents, vocabulary_size: int, tokenizer_fingerprint: str) -> InprocessLink:
    """Start a drafter and link it to a target's events. Raises `WrongVocabulary`."""
    if drafter.vocabulary_size not in (0, vocabulary_size):
        raise WrongVocabulary(
            f"the draft's vocabulary has {drafter.vocabulary_size} tokens, the target's {vocabulary_size}"
        )
    own = fingerprint_of(drafter)
    if own and tokenizer_fingerprint not in ("", own):
        raise WrongVocabulary("the draft was made for another tokenizer")
    LOOPS.compile_beside(loops_of(drafter))
    drafter.start()
    return ThreadedLink(drafter, events) if device_of(drafter) != "cpu" else InprocessLink(drafter, events)


class InprocessLink:
    """A `DraftLink` to a started drafter in this process. One thread at a time may call it."""

    def __init__(self, drafter: Drafter, events: DraftEvents) -> None:
        self._drafter = drafter
        self._events = events
        self._faults = FaultLog(drafter.name)
        admission = SequenceAdmission(DraftConfig.max_sequences)
        self._session: ProposeSession | None = ProposeSession(drafter, admission, DEFAULT_TENANT, self._faults)
        self._stopped = False
        events.receive(Connected(info_of(drafter, drafter.vocabulary_size)))

    def open(self, sequence: OpenSequence) -> None:
        def work(session: ProposeSession) -> None:
            # The engine may open a sequence again; over the network fresh ids separate the two.
            session.close([sequence.sequence_id])
            self._attempt(session, partial(self._open, session), [sequence])

        self._run(work)

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self._run(lambda session: self._attempt(session, session.advance, advances))

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        def work(session: ProposeSession) -> None:
            self._attempt(session, session.add_features, features)
            try:
                session.absorb({one.sequence_id for one in features})
            except DrafterFailed as failed:
                self._close_failed(session, failed.sequence_ids, failed.error)

        self._run(work)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._run(lambda session: session.close(sequence_ids))

    def cut_off(self, reason: str) -> None:
        """Continue without the drafter, for good: reconnecting would not help."""

        def work(_session: ProposeSession) -> None:
            raise DraftUnavailable(reason)

        self._run(work)

    def stop(self) -> None:
        """End every sequence and stop the drafter, also one that failed. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._do([ProposeSession.end])
        self._session = None
        try:
            self._drafter.stop()
        # As below: the engine must be able to stop its other parts.
        except Exception:
            logger.exception("the drafter failed while it stopped")

    def _run(self, work: Callable[[ProposeSession], None]) -> None:
        self._do([work])

    def _do(self, works: Sequence[Callable[[ProposeSession], None]]) -> None:
        """Do all of it, and then deliver growth once. Does nothing once the drafter has failed or is stopped."""
        if self._session is None:
            return
        try:
            for work in works:
                work(self._session)
            self._answer(self._session)
        # A bug in the drafter must not end the engine, as with a drafter in another process.
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Log the current exception, and continue without drafts."""
        logger.exception("the drafter failed; decoding goes on without it")
        self._session = None
        self._events.receive(Disconnected(f"the drafter failed: {text_of(error)}"))

    def _attempt(self, session: ProposeSession, step: Callable[[Part], object], parts: Sequence[Part]) -> None:
        for part in parts:
            try:
                step(part)
            # A bug in one sequence must not end drafting for the others.
            except Exception as error:
                self._close_failed(session, [part.sequence_id], error)

    def _open(self, session: ProposeSession, sequence: OpenSequence) -> None:
        self._events.receive(Opened(sequence.sequence_id, session.open(sequence).features_from))

    def _close_failed(self, session: ProposeSession, sequence_ids: Sequence[int], error: Exception) -> None:
        refusal = self._faults.refusal(error)
        session.close(sequence_ids)
        for sequence_id in sequence_ids:
            self._events.receive(SequenceFailure(sequence_id, refusal.reason, refusal.message))

    def _answer(self, session: ProposeSession) -> None:
        """Deliver all growth that is due. Credit bounds a queue, and there is none here."""
        while session.awaits_growth:
            session.grant(1 - session.credit)
            try:
                growths = session.propose_growth()
            except DrafterFailed as failed:
                self._close_failed(session, failed.sequence_ids, failed.error)
            else:
                self._events.receive(Grown(growths))


class ThreadedLink(InprocessLink):
    """A `DraftLink` to a started drafter on a GPU, which works on a thread of its own.

    One thread at a time may call it. Calls return at once, and growth is delivered from the drafter's thread. On the
    target's own GPU the drafter's kernels run beside the target's passes, and before them where both wait for an SM.
    """

    def __init__(self, drafter: Drafter, events: DraftEvents) -> None:
        self._works: SimpleQueue[Callable[[ProposeSession], None] | None] = SimpleQueue()
        super().__init__(drafter, events)
        self._thread = threading.Thread(target=self._work, name="drafter", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """See `InprocessLink.stop`. Waits for the drafter's thread."""
        self._works.put(None)
        self._thread.join()
        super().stop()

    def _run(self, work: Callable[[ProposeSession], None]) -> None:
        """Do `work` on the thread, which delivers growth."""
        self._works.put(work)

    def _work(self) -> None:
        """Until `stop`: do all queued work, and then deliver growth once, so that trees are for the newest commits."""
        # Imported here: drafters without a GPU run without PyTorch.
        from draft_service.neural.devices import launching_on

        try:
            with launching_on(device_of(self._drafter)):
                stopping = False
                while not stopping:
                    works = [self._works.get()]
                    while not self._works.empty():
                        works.append(self._works.get())
                    stopping = None in works
                    self._do([work for work in works if work is not None])
        # Otherwise the thread would end silently.
        except Exception as error:
            self._fail(error)
