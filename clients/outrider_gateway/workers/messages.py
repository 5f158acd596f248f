"""Messages between a gateway's parent and its workers: structs in msgpack, in frames of `outrider.processes.framing`.
Decoding never runs code from the socket."""

from __future__ import annotations

import msgspec

from outrider.processes.framing import Buffer, framed
from outrider.telemetry.registry import Figures
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.stored_responses import StoredResponse


class _WorkerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the messages below."""


# To a worker.


class ConfigureWorker(_WorkerMessage, frozen=True):
    """The first message. `place` is the worker's among `workers`; `secret` is of the counts in `memory_bytes` of shared
    memory."""

    config: GatewayConfig
    access: AccessOptions
    place: int
    workers: int
    secret: bytes
    memory_bytes: int


class Drain(_WorkerMessage, frozen=True):
    """End when running answers have ended, or at once."""

    at_once: bool


class AskFigures(_WorkerMessage, frozen=True):
    """Answered by `Counted`."""


class Kept(_WorkerMessage, frozen=True):
    """The answer to `Keep`: whether the response is kept."""

    call: int
    kept: bool


class Found(_WorkerMessage, frozen=True):
    """The answer to `Find`."""

    call: int
    response: StoredResponse | None


class Deleted(_WorkerMessage, frozen=True):
    """The answer to `Delete`: whether there was such a response."""

    call: int
    deleted: bool


class Page(_WorkerMessage, frozen=True):
    """The answer to `AskPage`: the text of /metrics."""

    call: int
    page: bytes


# From a worker.


class Serving(_WorkerMessage, frozen=True):
    """It takes connections from now on."""


class WorkerRefused(_WorkerMessage, frozen=True):
    """Its settings cannot work; it ends."""

    reason: str


class Counted(_WorkerMessage, frozen=True):
    """What it has counted so far: once a second, and when asked."""

    figures: Figures
    asked: bool = False


class Keep(_WorkerMessage, frozen=True):
    """Keep a response of a tenant."""

    call: int
    tenant: str
    response_id: str
    response: StoredResponse


class Find(_WorkerMessage, frozen=True):
    """Find a response of a tenant."""

    call: int
    tenant: str
    response_id: str


class Delete(_WorkerMessage, frozen=True):
    """Forget a response of a tenant."""

    call: int
    tenant: str
    response_id: str


class AskPage(_WorkerMessage, frozen=True):
    """The text of /metrics, of all workers together."""

    call: int


Answer = Kept | Found | Deleted | Page
ToWorker = ConfigureWorker | Drain | AskFigures | Answer
FromWorker = Serving | WorkerRefused | Counted | Keep | Find | Delete | AskPage

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def pack(message: ToWorker | FromWorker) -> bytes:
    """The frame of a message."""
    return framed(_encoder.encode(message))


def for_worker(body: Buffer) -> ToWorker:
    """The message of a frame's body, as a worker receives it."""
    message: ToWorker = _to_worker.decode(body)
    return message


def for_parent(body: Buffer) -> FromWorker:
    """The message of a frame's body, as the parent receives it."""
    message: FromWorker = _from_worker.decode(body)
    return message
