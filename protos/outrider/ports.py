"""Whether somebody could listen on a port, asked before what takes long to load, and ports that are free. Needs no
gRPC."""

from __future__ import annotations

import errno
import socket
from typing import Any


def port_refusal(host: str, port: int) -> OSError | None:
    """Why nobody could listen there now; None where one could. An empty host is all of the machine's addresses."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    failures = [refused for one in found if (refused := _refusal(one[0], one[4])) is not None]
    # Of a name's addresses one is enough, as long as nobody else has another.
    taken = [refused for refused in failures if refused.errno in (errno.EADDRINUSE, errno.EACCES)]
    if taken or len(failures) == len(found):
        return (taken or failures)[0]
    return None


def free_port() -> int:
    """A port of the loopback that nobody listened on a moment ago."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
    return port


def _refusal(family: int, where: tuple[Any, ...]) -> OSError | None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: a connection that has ended lately keeps nobody out.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(where)
            probe.listen()
        except OSError as error:
            return error
    return None
