"""What passes between the process that serves and the one that holds the engine: messages, and their frames.

A frame is four bytes of length, then JSON. JSON, because nothing that can run code is read from a socket here, and
because its C encoder is quick enough: `benchmarks/engine/engine_process.py` measures both ends of a step's report.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from outrider.tree import TokenTree
from outrider.wire.frames import DraftInfo
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import (
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    Verdict,
)
from target_service.engine_process import rows

LENGTH_BYTES = 4
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode

# To the engine.


@dataclass(frozen=True, slots=True)
class Configure:
    """The first message: the settings to load a model with."""

    config: TargetConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request under an id that was never used before."""

    sequence_id: int
    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify a client's tree in the next step."""

    sequence_id: int
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a sequence."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Fail what is left, and end."""


# From the engine.


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. The first message, unless it is `Refused`."""

    served: ServedModel


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot run: what to say, and the status to exit with."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last report: at most one step's events. Also a sign of life, when nothing did."""

    events: list[SequenceEvent]
    steps: list[StepStats]
    # Sequences that ended without an event, and how: cancelled ones.
    ended: list[tuple[int, SequenceTotals, str]]
    # Each time that drafting was switched by load: whether it is on.
    switches: list[bool]
    snapshot: EngineSnapshot
    beat_ns: int


@dataclass(frozen=True, slots=True)
class Drafter:
    """The draft service came, went or changed."""

    info: DraftInfo | None


@dataclass(frozen=True, slots=True)
class Dead:
    """A step failed. The engine's process logs why, and ends."""

    reason: str


Message = Configure | Submit | Verify | Cancel | Stop | Ready | Refused | Report | Drafter | Dead


def pack(message: Message) -> bytes:
    """The frame of a message."""
    kind = type(message)
    body = _encode((kind.__name__, *_BODIES[kind](message))).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def unpack(body: bytes) -> Message:
    """The message of a frame without its length."""
    kind, *fields = json.loads(body)
    message: Message = _MAKERS[kind](*fields)
    return message


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`."""
        self._buffer += data
        messages: list[Message] = []
        begin = 0
        while (start := begin + LENGTH_BYTES) <= len(self._buffer):
            end = start + int.from_bytes(self._buffer[begin:start], "big")
            if end > len(self._buffer):
                break
            messages.append(unpack(bytes(self._buffer[start:end])))
            begin = end
        del self._buffer[:begin]
        return messages


def _report_body(report: Report) -> tuple[Any, ...]:
    verdicts, finished, failed = [], [], []
    for event in report.events:
        if isinstance(event, Verdict):
            verdicts.append(rows.verdict_to_row(event))
        elif isinstance(event, SequenceFinished):
            finish, totals = rows.finish_to_row(event.finish), rows.totals_to_row(event.totals)
            finished.append((event.sequence_id, finish, totals))
        else:
            failed.append((event.sequence_id, rows.error_to_row(event.error)))
    return (
        verdicts,
        finished,
        failed,
        [rows.stats_to_row(stats) for stats in report.steps],
        [(sequence_id, rows.totals_to_row(totals), outcome) for sequence_id, totals, outcome in report.ended],
        report.switches,
        rows.snapshot_to_row(report.snapshot),
        report.beat_ns,
    )


def _report(
    verdicts: rows.Row,
    finished: rows.Row,
    failed: rows.Row,
    steps: rows.Row,
    ended: rows.Row,
    switches: list[bool],
    snapshot: rows.Row,
    beat_ns: int,
) -> Report:
    """A sequence's verdict comes before its end; between sequences order means nothing."""
    events: list[SequenceEvent] = [rows.verdict_from_row(row) for row in verdicts]
    for sequence_id, finish, totals in finished:
        events.append(SequenceFinished(sequence_id, rows.finish_from_row(finish), rows.totals_from_row(totals)))
    events += [SequenceFailed(sequence_id, rows.error_from_row(error)) for sequence_id, error in failed]
    return Report(
        events,
        [rows.stats_from_row(row) for row in steps],
        [(sequence_id, rows.totals_from_row(totals), outcome) for sequence_id, totals, outcome in ended],
        switches,
        rows.snapshot_from_row(snapshot),
        beat_ns,
    )


_BODIES: Mapping[type[Any], Callable[[Any], tuple[Any, ...]]] = MappingProxyType(
    {
        Configure: lambda message: (dataclasses.asdict(message.config),),
        Submit: lambda message: (message.sequence_id, rows.request_to_fields(message.request)),
        Verify: lambda message: (message.sequence_id, rows.tree_to_row(message.tree)),
        Cancel: lambda message: (message.sequence_id,),
        Stop: lambda _: (),
        Ready: lambda message: (rows.served_to_fields(message.served),),
        Refused: lambda message: (message.status, message.reason),
        Report: _report_body,
        Drafter: lambda message: (None if message.info is None else rows.draft_to_fields(message.info),),
        Dead: lambda message: (message.reason,),
    }
)
_MAKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Configure": lambda fields: Configure(TargetConfig(**fields)),
        "Submit": lambda sequence_id, fields: Submit(sequence_id, rows.request_from_fields(fields)),
        "Verify": lambda sequence_id, row: Verify(sequence_id, rows.tree_from_row(row)),
        "Cancel": Cancel,
        "Stop": Stop,
        "Ready": lambda fields: Ready(rows.served_from_fields(fields)),
        "Refused": Refused,
        "Report": _report,
        "Drafter": lambda fields: Drafter(None if fields is None else rows.draft_from_fields(fields)),
        "Dead": Dead,
    }
)
