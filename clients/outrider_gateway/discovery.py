"""Where targets that come and go are found: behind a DNS name, whose addresses the system's resolver has, or wherever a
source of the caller's own finds them. Sources are asked again and again."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.addresses import address_at
from outrider.log_limit import LogLimit

logger = logging.getLogger(__name__)
SCHEME = "dns:///"
# Looks a name up: (host, port) to entries as `socket.getaddrinfo` returns them.
LookUp = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]


class AddressSource(Protocol):
    """Finds the addresses of targets. Its text names it to callers and in logs."""

    async def addresses(self) -> list[str]:
        """HOST:PORT or unix:PATH of every target that takes requests now; empty where none is known, also for a
        failure, which changes nothing. Raises nothing."""


@dataclass(frozen=True)
class TargetName:
    """A name of which each address is a target, such as that of a headless Kubernetes service."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{SCHEME}{self.host}:{self.port}"


def target_name(address: str) -> TargetName | None:
    """The name of `dns:///HOST:PORT`; None for an address of one target. Raises `ValueError` for a name without a port,
    and for one with the address of a name server."""
    if not address.startswith("dns:"):
        return None
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not {SCHEME}HOST:PORT, for which the system's resolver is asked")
    return TargetName(host, int(port))


async def system_resolver(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """The entries of the system's resolver: `/etc/hosts`, search domains and name servers."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class Resolver:
    """An `AddressSource`: the addresses of one name."""

    def __init__(self, name: TargetName, look_up: LookUp = system_resolver) -> None:
        self.name = name
        self._look_up = look_up
        self._failures = LogLimit()

    def __str__(self) -> str:
        return str(self.name)

    async def addresses(self) -> list[str]:
        """HOST:PORT of every address, sorted; empty where there is none, and where no name server answers, which
        cannot be distinguished on every system."""
        try:
            entries = await self._look_up(self.name.host, self.name.port)
        except OSError as error:
            if self._failures.due() is not None:
                logger.warning("%s has no address: %s", self.name, error.strerror or error)
            return []
        return sorted({address_at(*entry[4][:2]) for entry in entries})
