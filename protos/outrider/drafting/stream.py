"""The target's side of one `Propose` stream, without its transport: ids, credit, and what a draft may say.

Sequences get a fresh id on the wire each time they are opened, so what a draft still sends for an earlier life of a
sequence is recognised and dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.errors import CreditExceeded, InvalidField, PositionOutOfRange
from outrider.v1 import draft_pb2
from outrider.wire.drafts import MAX_NODES, advance_to_pb, failure_from_pb, growth_from_pb, open_to_pb
from outrider.wire.frames import (
    MAX_CLOSED_PER_FRAME,
    MAX_FEATURE_BYTES,
    MAX_SEQUENCES_PER_FRAME,
    DraftEvents,
    OpenSequence,
    SequenceAdvance,
    SequenceFailure,
    SequenceFeatures,
    SequenceGrowth,
)
from outrider.wire.hidden_states import features_to_pb

# Growth frames that may be under way at once.
CREDIT_WINDOW = 32
# Growth frames that one frame of ours earns the draft. It bounds what can pile up while the engine is in a long
# step, however fast the draft sends.
GROWTHS_PER_FRAME = 4
# Unused earnings that are kept: a draft that rarely sends may not save up for a flood.
MAX_ALLOWANCE = 256
# Growths, nodes and distributions that an open, an advance or a piece of features earns: those of four whole trees,
# where a draft owes one and may send another once it has more. Frames alone would be credit for any number of them.
WORK_PER_ANSWER = 4 * (1 + 2 * MAX_NODES)
# Earnings that are kept are those of so many answers, or of one for each open sequence.
MAX_ANSWERS_KEPT = 64
# Features in one frame. With one more piece a frame is still well below a draft's limit of 4 MiB for a message.
MAX_FRAME_FEATURE_BYTES = 2 * MAX_FEATURE_BYTES

_Part = TypeVar("_Part", draft_pb2.SequenceAdvance, draft_pb2.SequenceFeatures)


class DraftConversation:
    """What was said on one stream, and what is to be said next (`outgoing`).

    A bad growth ends drafting for its sequence only. `CreditExceeded` and `InvalidField` from `hear` mean that the
    whole stream cannot be trusted.
    """

    def __init__(self, events: DraftEvents, vocabulary_size: int) -> None:
        self._events = events
        self._vocabulary_size = vocabulary_size
        self._wire_ids: dict[int, int] = {}
        self._sequence_ids: dict[int, int] = {}
        self._last_wire_id = 0
        self._credit = 0
        self._allowance = CREDIT_WINDOW
        # Growths, nodes and distributions that the draft may still send.
        self._work = 0
        # Acknowledgements and failures that the draft may still send: at most one per open, advance and piece of
        # features.
        self._answers = 0
        self._asked_at: float | None = None
        # Longest sequence the draft follows; 0 when that is not known. A longer one is not even sent: as a message
        # past the draft's size limit it would cost every sequence its stream.
        self.max_context = 0
        self.received = False
        self.outgoing: deque[draft_pb2.ProposeRequest] = deque()
        self._grant()

    @property
    def silence(self) -> float:
        """Seconds for which the draft has owed an answer and sent nothing."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def open(self, sequence: OpenSequence) -> None:
        """Send that a sequence starts, under a fresh id. An earlier life of it that is still open is closed."""
        self.close([sequence.sequence_id])
        if self.max_context and len(sequence.token_ids) > self.max_context:
            error = PositionOutOfRange("the sequence is longer than the draft follows")
            self._events.on_failure(SequenceFailure(sequence.sequence_id, error.reason, error.message))
            return
        self._last_wire_id += 1
        wire_id = self._last_wire_id
        self._wire_ids[sequence.sequence_id] = wire_id
        self._sequence_ids[wire_id] = sequence.sequence_id
        opened = open_to_pb(replace(sequence, sequence_id=wire_id))
        self._ask(draft_pb2.ProposeRequest(open=opened), answers=1)

    def advance(self, advances: Iterable[SequenceAdvance]) -> None:
        """Send what one step committed. Sequences that the draft has given up on are left out."""
        parts, wire_ids, with_features = [], self._wire_ids, False
        for advance in advances:
            wire_id = wire_ids.get(advance.sequence_id)
            if wire_id is not None:
                part = advance_to_pb(advance)
                part.sequence_id = wire_id
                parts.append(part)
                with_features = with_features or advance.features is not None
        alone = parts and not with_features and len(parts) <= MAX_SEQUENCES_PER_FRAME
        for some in [parts] if alone else _in_frames(parts):
            frame = draft_pb2.ProposeRequest(advance=draft_pb2.AdvanceSequences(sequences=some))
            self._ask(frame, answers=len(some))

    def send_features(self, features: Iterable[SequenceFeatures]) -> None:
        """Bring features of known tokens. Sequences that the draft has given up on are left out."""
        parts = []
        for one in features:
            wire_id = self._wire_ids.get(one.sequence_id)
            if wire_id is not None:
                part = features_to_pb(one)
                part.sequence_id = wire_id
                parts.append(part)
        for some in _in_frames(parts):
            # No answer is owed, but a failure may come, and growth once there is enough of them.
            self._earn(len(some))
            self.outgoing.append(draft_pb2.ProposeRequest(features=draft_pb2.SendFeatures(sequences=some)))

    def close(self, sequence_ids: Iterable[int]) -> None:
        """Send that sequences end. Ids that are not open are ignored."""
        wire_ids = [self._wire_ids.pop(each) for each in sequence_ids if each in self._wire_ids]
        for wire_id in wire_ids:
            del self._sequence_ids[wire_id]
        for begin in range(0, len(wire_ids), MAX_CLOSED_PER_FRAME):
            close = draft_pb2.CloseSequences(sequence_ids=wire_ids[begin : begin + MAX_CLOSED_PER_FRAME])
            self.outgoing.append(draft_pb2.ProposeRequest(close=close))
        if not self._wire_ids:
            self._asked_at = None

    def receive(self, frame: draft_pb2.ProposeResponse) -> None:
        """Check one frame of the draft and deliver what it holds.

        Raises `CreditExceeded` for more frames, or more in them, than was allowed, `InvalidField` for an unreadable
        failure.
        """
        self._asked_at = None
        kind = frame.WhichOneof("frame")
        if kind in ("opened", "status"):
            self._charge_answer()
            if kind == "status":
                self._fail(failure_from_pb(frame.status))
        else:
            # A frame of a kind unknown here, from a newer draft, is ignored but has its price.
            self._charge_credit()
            self._charge_work(frame.growth.sequences)
            self._grow(frame.growth.sequences)
        self.received = True

    def _grow(self, parts: Iterable[draft_pb2.SequenceGrowth]) -> None:
        growths: list[SequenceGrowth] = []
        sequence_ids, vocabulary_size = self._sequence_ids, self._vocabulary_size
        for i, part in enumerate(parts):
            sequence_id = sequence_ids.get(part.sequence_id)
            if sequence_id is None:
                # Closed while the growth was on its way.
                continue
            part.sequence_id = sequence_id
            try:
                growths.append(growth_from_pb(part, vocabulary_size, MAX_NODES, f"growth.sequences[{i}]"))
            except InvalidField as error:
                self.close([sequence_id])
                self._events.on_failure(SequenceFailure(sequence_id, error.reason, error.message))
        if growths:
            self._events.on_growth(growths)

    def _fail(self, failure: SequenceFailure) -> None:
        sequence_id = self._sequence_ids.pop(failure.sequence_id, None)
        if sequence_id is not None:
            del self._wire_ids[sequence_id]
            self._events.on_failure(replace(failure, sequence_id=sequence_id))

    def _ask(self, frame: draft_pb2.ProposeRequest, answers: int) -> None:
        self._earn(answers)
        self.outgoing.append(frame)
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _earn(self, answers: int) -> None:
        self._answers += answers
        most = WORK_PER_ANSWER * max(MAX_ANSWERS_KEPT, len(self._wire_ids))
        self._work = min(self._work + WORK_PER_ANSWER * answers, most)
        self._allowance = min(self._allowance + GROWTHS_PER_FRAME, MAX_ALLOWANCE)
        self._grant()

    def _charge_answer(self) -> None:
        if not self._answers:
            raise CreditExceeded("the draft acknowledges what was never asked")
        self._answers -= 1

    def _charge_credit(self) -> None:
        if not self._credit:
            raise CreditExceeded("the draft sends more than it has credit for")
        self._credit -= 1
        self._grant()

    def _charge_work(self, parts: Sequence[draft_pb2.SequenceGrowth]) -> None:
        """Before any of it is looked at."""
        if len(parts) > MAX_SEQUENCES_PER_FRAME:
            raise CreditExceeded(f"the draft sends more than {MAX_SEQUENCES_PER_FRAME} growths in a frame")
        self._work -= sum(1 + len(part.token_ids) + len(part.distributions) for part in parts)
        if self._work < 0:
            raise CreditExceeded("the draft sends more nodes than it was asked for")

    def _grant(self) -> None:
        """Fill the window again once half of it is used, as far as the allowance goes."""
        if self._credit > CREDIT_WINDOW // 2 or not self._allowance:
            return
        frames = min(CREDIT_WINDOW - self._credit, self._allowance)
        self._credit += frames
        self._allowance -= frames
        self.outgoing.append(draft_pb2.ProposeRequest(credit=draft_pb2.Credit(frames=frames)))


def _in_frames(parts: list[_Part]) -> Iterator[list[_Part]]:
    """The parts of one frame, or of several where they, or their features, are too many for one."""
    some: list[_Part] = []
    size = 0
    for part in parts:
        more = len(part.features.data)
        if some and (size + more > MAX_FRAME_FEATURE_BYTES or len(some) == MAX_SEQUENCES_PER_FRAME):
            yield some
            some, size = [], 0
        some.append(part)
        size += more
    if some:
        yield some
