"""Messages between a gateway's parent and its workers, and their frames."""

from __future__ import annotations

from outrider.processes.messages import MessageCodec, ProcessMessage
from outrider.telemetry.registry import Figures
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.stored_responses import StoredResponse

# To a worker.

# What goes with a connection that is handed over. By the second an idle connection is closed as well if the peer could
# have no further one.
HANDED, MAKES_ROOM = b"\0", b"\1"


class ConfigureWorker(ProcessMessage, frozen=True):
    """The first message. `place` is the worker's among `workers`; `secret` is of the counts in `memory_bytes` of shared
    memory."""

    config: GatewayConfig
    access: AccessOptions
    place: int
    workers: int
    secret: bytes
    memory_bytes: int


class Drain(ProcessMessage, frozen=True):
    """End when running answers have ended, or at once."""

    at_once: bool


class AskFigures(ProcessMessage, frozen=True):
    """Answered by `Counted`."""


class ParentAnswer(ProcessMessage, frozen=True):
    """The answer to a call: of `Keep` and `Delete` whether it was done, of `Find` the response if there is such a one,
    of `AskPage` the text of /metrics."""

    call: int
    value: bool | bytes | StoredResponse | None


# From a worker.


class Serving(ProcessMessage, frozen=True):
    """It takes connections from now on."""


class WorkerRefused(ProcessMessage, frozen=True):
    """Its settings cannot work; it ends."""

    reason: str


class Counted(ProcessMessage, frozen=True):
    """What it has counted so far: once a second, and when asked."""

    figures: Figures
    asked: bool = False


class Keep(ProcessMessage, frozen=True):
    """Keep a response of a tenant."""

    call: int
    tenant: str
    response_id: str
    response: StoredResponse


class Find(ProcessMessage, frozen=True):
    """Find a response of a tenant."""

    call: int
    tenant: str
    response_id: str


class Delete(ProcessMessage, frozen=True):
    """Forget a response of a tenant."""

    call: int
    tenant: str
    response_id: str


class AskPage(ProcessMessage, frozen=True):
    """The text of /metrics, of all workers together."""

    call: int


ToWorker = ConfigureWorker | Drain | AskFigures | ParentAnswer
FromWorker = Serving | WorkerRefused | Counted | Keep | Find | Delete | AskPage

_to_worker: MessageCodec[ToWorker] = MessageCodec(ToWorker)
_from_worker: MessageCodec[FromWorker] = MessageCodec(FromWorker)
# Named by who reads them.
pack_for_worker, for_worker = _to_worker.pack, _to_worker.unpack
pack_for_parent, for_parent = _from_worker.pack, _from_worker.unpack
