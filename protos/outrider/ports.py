"""Whether a server could listen on a port, checked before anything slow is loaded, and free ports. Needs no gRPC."""

from __future__ import annotations

import errno
import socket
from typing import Any


def port_refusal(host: str, port: int) -> OSError | None:
    """Why a server could not listen there now; None if it could. An empty host is all of the machine's addresses."""
    try:
        addresses = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    failures = [failure for family, *_, address in addresses if (failure := _refusal(family, address)) is not None]
    # One address of a name is enough, unless another is taken or forbidden.
    taken = [failure for failure in failures if failure.errno in (errno.EADDRINUSE, errno.EACCES)]
    if taken or len(failures) == len(addresses):
        return (taken or failures)[0]
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A port of one of this machine's addresses that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def _refusal(family: int, address: tuple[Any, ...]) -> OSError | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As in gRPC: a connection that ended recently does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            return error
    return None
