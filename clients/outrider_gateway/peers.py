"""Who a connection comes from, as far as its address tells."""

from __future__ import annotations

import contextlib
import ipaddress


def peer_name(address: str) -> str:
    """Which peer has this address: all of an IPv6 network are one."""
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        # An IPv6 peer is whoever has its network: a site has 2^64 addresses.
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address
