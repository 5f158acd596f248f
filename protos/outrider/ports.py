"""Whether a server could listen on a port, checked before anything slow is loaded, and free ports. Needs no gRPC."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path
from typing import Any

# Between those of Ray's workers (10002 to 19999 unless told otherwise) and of Kubernetes' nodes (30000 to 32767), and
# below the first that Linux gives to whoever asks for any (32768 unless told otherwise).
_RARELY_USED = range(20_000, 30_000)
_FIRST_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
# Seeded by nobody, and by itself in forked processes.
_dice = random.SystemRandom()
_chosen: set[int] = set()


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
    """A port of one of this machine's addresses that was free a moment ago, another with each call.

    Not one that the system would give to a connection, or to a server that asks for any, before the caller listens.
    """
    for port in (_dice.choice(_RARELY_USED) for _ in range(_TRIES if _first_given() >= _RARELY_USED.stop else 0)):
        if port not in _chosen and port_refusal(host, port) is None:
            _chosen.add(port)
            return port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        given: int = probe.getsockname()[1]
    return given


def _first_given() -> int:
    """The first port that the system gives to whoever asks for any."""
    with contextlib.suppress(OSError):
        return int(_FIRST_GIVEN.read_text().split()[0])
    # IANA's dynamic ports (RFC 6335, section 6), as macOS and Windows have them.
    return 49_152


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
