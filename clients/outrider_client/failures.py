"""What can go wrong on the way to a service, as typed exceptions.

Errors that the service itself reports are the classes of `outrider.errors`. A service that cannot be reached is
`ServiceUnreachable`, which is a `ConnectionError`.
"""

from __future__ import annotations

import asyncio

import grpc

from outrider.errors import DeadlineExceeded, Draining, EngineDead, Loading, OutriderError
from outrider.unreachable import TlsProblem as TlsProblem
from outrider.unreachable import cause_of, proxy_hint
from outrider.wire.trees import error_of_rpc


class ServiceUnreachable(ConnectionError):
    """The address does not answer, or the connection broke. Trying again later makes sense, unless there is a
    `tls_problem`. `cause` is a short reason, `detail` gRPC's whole message."""

    def __init__(self, address: str, detail: str) -> None:
        self.cause, self.tls_problem = cause_of(detail)
        super().__init__(f"cannot reach {address}: {self.cause}{proxy_hint(address)}")
        self.address = address
        self.detail = detail


# Failures of a target that has stopped, is about to, or does not serve yet: another may answer, or take its place.
AWAY = (ServiceUnreachable, Draining, EngineDead, Loading)


def typed_error(error: grpc.RpcError, address: str) -> OutriderError | ServiceUnreachable:
    """The exception a caller should see for a failed call to `address`."""
    typed = error_of_rpc(error)
    if type(typed) is not OutriderError:
        return typed
    # Codes without details come from gRPC itself: the client's own deadline, or the transport.
    code = typed.metadata.get("code")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED.name:
        return DeadlineExceeded("the deadline passed before the answer was complete")
    # The message of a stream of which a write finds the connection lost before a read does.
    if code == grpc.StatusCode.UNAVAILABLE.name or typed.message == "Internal error from Core":
        return ServiceUnreachable(address, typed.message)
    # The status message of a call that reaches a gRPC server just as it stops. Calls that we cancel have another
    # message.
    if code == grpc.StatusCode.CANCELLED.name and typed.message == "CANCELLED":
        return ServiceUnreachable(address, "it stopped as the call came")
    return typed


def cancellations() -> int:
    """How often the running task was asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()
