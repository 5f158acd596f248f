"""The host names that an HTTP port accepts, which protects a local port from web pages (DNS rebinding).

Once loaded, a page may let its own name resolve to 127.0.0.1 or a private address. For the browser the port is then the
page's own server, which the page may read whatever CORS allows. The browser still sends the page's name as `Host`.
Addresses cannot be redirected, so every address is accepted.
"""

from __future__ import annotations

import ipaddress
import re
import socket

# RFC 6761: it and every name below it mean the local machine.
_LOOPBACK = ".localhost"


class HostNames:
    """A set of names; one with a leading dot stands for itself and every name below it."""

    def __init__(self, *names: str) -> None:
        self._exact = frozenset(name.removeprefix(".") for name in names)
        self._below = tuple(name for name in names if name.startswith("."))

    @classmethod
    def of_listener(cls, host: str, *others: str) -> HostNames:
        """This machine's names, the `host` that is listened on, and `others`, which are in lower case."""
        return cls(_LOOPBACK, host.lower(), socket.gethostname().lower(), *others)

    def answers(self, host: str) -> bool:
        """Whether the value of a `Host` header is an address or one of the names, with any port."""
        match = re.fullmatch(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::\d*)?", host.strip())
        if match is None:
            return False
        name = match[1].lower().removesuffix(".")
        return name in self._exact or name.endswith(self._below) or _address(match[1]) is not None


def is_loopback(host: str) -> bool:
    """Whether a name or an address to listen on is reachable only from this machine."""
    address = _address(host)
    if address is None:
        return HostNames(_LOOPBACK).answers(host)
    # Some versions of Python do not count an IPv4 address in IPv6 notation as loopback.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
