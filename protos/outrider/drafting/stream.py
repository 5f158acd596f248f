"""The target's side of one `Propose` stream, without its transport: ids, credit, and checks of what a draft sends.

A sequence gets a fresh id on the wire each time it is opened, so late frames for an earlier opening are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.drafting.events import DraftEvents, Grown, Opened, SequenceFailure
from outrider.errors import CreditExceeded, InvalidField, OutriderError, PositionOutOfRange
from outrider.v1 import draft_pb2
from outrider.wire.drafts import advance_to_pb, growth_from_pb, open_to_pb
from outrider.wire.frames import (
    MAX_CLOSED_PER_FRAME,
    MAX_FEATURE_BYTES,
    MAX_NODES,
    MAX_SEQUENCES_PER_FRAME,
    OpenSequence,
    SequenceAdvance,
    SequenceFeatures,
    SequenceGrowth,
)
from outrider.wire.hidden_states import features_to_pb
from outrider.wire.trees import error_of

# Growth frames that may be in flight.
CREDIT_WINDOW = 32
# Growth frames of credit that one frame of ours adds. It bounds what a fast draft can queue during a long engine step.
GROWTHS_PER_FRAME = 4
# Most credit that is saved: a draft that rarely sends must not save up for a flood.
MAX_ALLOWANCE = 256
# Growths, nodes and distributions that one open, advance or piece of features allows: those of four whole trees, where
# one is due from a draft, which may send another once it has more. Credit in frames does not bound them.
WORK_PER_ANSWER = 4 * (1 + 2 * MAX_NODES)
# Work that is saved is at most that of this many answers, or of one per open sequence. With trees of 1,023 nodes 16
# save as much as 64 did with 255: what a burst may cost the engine.
MAX_ANSWERS_KEPT = 16
_Part = TypeVar("_Part", draft_pb2.SequenceAdvance, draft_pb2.SequenceFeatures)


class DraftConversation:
    """The state of one stream, and the frames to send next (`outgoing`). A bad growth ends drafting for its sequence
    only. `CreditExceeded` and `InvalidField` from `receive` mean that the whole stream cannot be trusted."""

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
        # Acknowledgements and failures that the draft may still send: one per advance and piece of features, and two
        # per open, since a drafter may fail at the tree of a sequence that is acknowledged already.
        self._answers = 0
        # Since when an answer of the draft is due, on the monotonic clock.
        self._owing_since: float | None = None
        # Longest sequence that the draft follows; 0 if unknown. A longer one is not sent: a message past the draft's
        # size limit would end the stream of all sequences.
        self.max_context = 0
        self.received = False
        self.outgoing: deque[draft_pb2.ProposeRequest] = deque()
        self._grant()

    @property
    def silence(self) -> float:
        """Seconds for which an answer of the draft was due and nothing came."""
        return 0.0 if self._owing_since is None else time.monotonic() - self._owing_since

    def open(self, sequence: OpenSequence) -> None:
        """Send a sequence under a fresh id, and close it first if it is open."""
        self.close([sequence.sequence_id])
        if self.max_context and len(sequence.token_ids) > self.max_context:
            error = PositionOutOfRange("the sequence is longer than the draft follows")
            self._events.receive(SequenceFailure(sequence.sequence_id, error.reason, error.message))
            return
        self._last_wire_id += 1
        wire_id = self._last_wire_id
        self._wire_ids[sequence.sequence_id] = wire_id
        self._sequence_ids[wire_id] = sequence.sequence_id
        opened = open_to_pb(replace(sequence, sequence_id=wire_id))
        self._answers += 1
        self._request(draft_pb2.ProposeRequest(open=opened), answers=1)

    def advance(self, advances: Iterable[SequenceAdvance]) -> None:
        """Send what one step committed. Sequences that the draft has closed are left out."""
        parts = self._under_wire_ids(map(advance_to_pb, advances))
        with_features = any(part.HasField("features") for part in parts)
        one_frame = parts and not with_features and len(parts) <= MAX_SEQUENCES_PER_FRAME
        for chunk in [parts] if one_frame else _in_frames(parts):
            frame = draft_pb2.ProposeRequest(advance=draft_pb2.AdvanceSequences(sequences=chunk))
            self._request(frame, answers=len(chunk))

    def send_features(self, features: Iterable[SequenceFeatures]) -> None:
        """Send features of tokens sent before. Sequences that the draft has closed are left out."""
        for chunk in _in_frames(self._under_wire_ids(map(features_to_pb, features))):
            # No answer is due, but a failure may come, and growth once there are enough features.
            self._allow(len(chunk))
            self.outgoing.append(draft_pb2.ProposeRequest(features=draft_pb2.SendFeatures(sequences=chunk)))

    def close(self, sequence_ids: Iterable[int]) -> None:
        """End sequences. Ids that are not open are ignored."""
        wire_ids = [self._wire_ids.pop(each) for each in sequence_ids if each in self._wire_ids]
        for wire_id in wire_ids:
            del self._sequence_ids[wire_id]
        for begin in range(0, len(wire_ids), MAX_CLOSED_PER_FRAME):
            close = draft_pb2.CloseSequences(sequence_ids=wire_ids[begin : begin + MAX_CLOSED_PER_FRAME])
            self.outgoing.append(draft_pb2.ProposeRequest(close=close))
        if not self._wire_ids:
            self._owing_since = None

    def receive(self, frame: draft_pb2.ProposeResponse) -> None:
        """Check one frame of the draft and deliver its events. Raises `CreditExceeded` for more frames, or more in
        them, than was allowed, and `InvalidField` for an unreadable failure."""
        self._owing_since = None
        kind = frame.WhichOneof("frame")
        if kind in ("opened", "status"):
            if not self._answers:
                raise CreditExceeded("the draft acknowledges what was never sent")
            self._answers -= 1
            if kind == "status":
                self._fail(frame.status.sequence_id, error_of(frame.status.status))
            elif (sequence_id := self._sequence_ids.get(frame.opened.sequence_id)) is not None:
                self._events.receive(Opened(sequence_id, frame.opened.features_from))
        else:
            # A frame of an unknown kind, from a newer draft, is ignored, but takes credit.
            if not self._credit:
                raise CreditExceeded("the draft sends more than it has credit for")
            self._credit -= 1
            self._grant()
            self._charge_work(frame.growth.sequences)
            self._grow(frame.growth.sequences)
        self.received = True

    def _grow(self, parts: Iterable[draft_pb2.SequenceGrowth]) -> None:
        growths: list[SequenceGrowth] = []
        sequence_ids, vocabulary_size = self._sequence_ids, self._vocabulary_size
        for i, part in enumerate(parts):
            sequence_id = sequence_ids.get(part.sequence_id)
            if sequence_id is None:
                # Closed while the growth was in flight.
                continue
            part.sequence_id = sequence_id
            try:
                growths.append(growth_from_pb(part, vocabulary_size, f"growth.sequences[{i}]"))
            except InvalidField as error:
                self.close([sequence_id])
                self._events.receive(SequenceFailure(sequence_id, error.reason, error.message))
        if growths:
            self._events.receive(Grown(growths))

    def _fail(self, wire_id: int, error: OutriderError) -> None:
        sequence_id = self._sequence_ids.pop(wire_id, None)
        if sequence_id is not None:
            del self._wire_ids[sequence_id]
            self._events.receive(SequenceFailure(sequence_id, error.reason, error.message))

    def _under_wire_ids(self, parts: Iterable[_Part]) -> list[_Part]:
        """The parts, under their ids on the wire, of sequences that the draft has not closed."""
        open_parts = []
        for part in parts:
            wire_id = self._wire_ids.get(part.sequence_id)
            if wire_id is not None:
                part.sequence_id = wire_id
                open_parts.append(part)
        return open_parts

    def _request(self, frame: draft_pb2.ProposeRequest, answers: int) -> None:
        """Send a frame that the draft has to answer."""
        self._allow(answers)
        self.outgoing.append(frame)
        if self._owing_since is None:
            self._owing_since = time.monotonic()

    def _allow(self, answers: int) -> None:
        """Add what the draft may send for these answers."""
        self._answers += answers
        most = WORK_PER_ANSWER * max(MAX_ANSWERS_KEPT, len(self._wire_ids))
        self._work = min(self._work + WORK_PER_ANSWER * answers, most)
        self._allowance = min(self._allowance + GROWTHS_PER_FRAME, MAX_ALLOWANCE)
        self._grant()

    def _charge_work(self, parts: Sequence[draft_pb2.SequenceGrowth]) -> None:
        """Charge for the parts of a frame, before any of them is read."""
        if len(parts) > MAX_SEQUENCES_PER_FRAME:
            raise CreditExceeded(f"the draft sends more than {MAX_SEQUENCES_PER_FRAME} growths in a frame")
        self._work -= sum(1 + len(part.token_ids) + len(part.distributions) for part in parts)
        if self._work < 0:
            raise CreditExceeded("the draft sends more nodes than was requested")

    def _grant(self) -> None:
        """Refill the window once half of it is used, as far as the allowance goes."""
        if self._credit > CREDIT_WINDOW // 2 or not self._allowance:
            return
        frames = min(CREDIT_WINDOW - self._credit, self._allowance)
        self._credit += frames
        self._allowance -= frames
        self.outgoing.append(draft_pb2.ProposeRequest(credit=draft_pb2.Credit(frames=frames)))


def _in_frames(parts: list[_Part]) -> Iterator[list[_Part]]:
    """The parts in chunks whose number and bytes of features fit one frame."""
    chunk: list[_Part] = []
    size = 0
    for part in parts:
        more = len(part.features.data)
        # Bytes of features in one frame. With one more piece a frame is still well below a draft's message limit of 4
        # MiB.
        if chunk and (size + more > 2 * MAX_FEATURE_BYTES or len(chunk) == MAX_SEQUENCES_PER_FRAME):
            yield chunk
            chunk, size = [], 0
        chunk.append(part)
        size += more
    if chunk:
        yield chunk
