"""The names that an HTTP port answers to: what keeps pages of the web out of one that only this machine reaches.

A page may have its own name mean 127.0.0.1, or an address of a private network, once it is loaded (DNS rebinding). To
the browser the port is then the page's own server, which the page may ask and read, whatever CORS says. It still sends
the page's name as `Host`. Nobody can make an address mean another, so every address is answered.
"""

from __future__ import annotations

import ipaddress
import re
import socket

# RFC 6761: it and every name below it mean the machine that asks.
_LOOPBACK = ".localhost"
_WITH_PORT = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::\d*)?")


class HostNames:
    """A set of names; one that begins with a dot stands for itself and every name below it."""

    def __init__(self, *names: str) -> None:
        self._exact = frozenset(name.removeprefix(".") for name in names)
        self._below = tuple(name for name in names if name.startswith("."))

    @classmethod
    def of_listener(cls, host: str, *others: str) -> HostNames:
        """The names of this machine, the one that `host` listens by, and `others`, which are in lower case."""
        return cls(_LOOPBACK, host.lower(), socket.gethostname().lower(), *others)

    def answers(self, host: str) -> bool:
        """Whether the value of a header `Host` is an address, or one of the names, on whichever port."""
        match = _WITH_PORT.fullmatch(host.strip())
        if match is None:
            return False
        name = match[1].lower().removesuffix(".")
        return name in self._exact or name.endswith(self._below) or _is_address(match[1])


def is_loopback(host: str) -> bool:
    """Whether a name or an address to listen on can be reached from this machine alone."""
    if not _is_address(host):
        return HostNames(_LOOPBACK).answers(host)
    address = ipaddress.ip_address(host.strip("[]"))
    # An address of IPv4 as IPv6 writes it, of which Python says for some versions that it is none of loopback.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
