"""Whether a text is the address of a service, checked before anything is connected or loaded. Needs no gRPC."""

from __future__ import annotations

from outrider.host_names import is_loopback

# Schemes of gRPC's name syntax; what follows them is not checked.
_SCHEMES = ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "passthrough")
# Schemes of URLs, and whether they imply TLS.
_URL_SCHEMES = {"http": False, "https": True, "grpc": False, "grpcs": True}


def address_problem(address: str) -> str | None:
    """Why this is no address, in one line; None for HOST:PORT, unix:PATH and gRPC's names, such as `dns:///`."""
    reason = _reason(address)
    return None if reason is None else f"{address!r} is not HOST:PORT or unix:PATH: {reason}"


def address_at(host: str, port: int) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_local(address: str) -> bool:
    """Whether an address is of this machine by its text: a socket, or a loopback address or name."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    plain = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition("/")[2]
    return is_loopback(plain.rpartition(":")[0])


def proxy_options(address: str) -> tuple[tuple[str, int], ...]:
    """Options of a channel to an address, so that none to this machine goes through a proxy."""
    # Of channels to services on this machine: gRPC would ask the proxy that `http_proxy` names for them too.
    return (("grpc.enable_http_proxy", 0),) if is_local(address) else ()


def _reason(address: str) -> str | None:
    scheme, colon, rest = address.partition(":")
    if rest.startswith("//") and scheme not in _SCHEMES:
        if scheme not in _URL_SCHEMES:
            return f"gRPC knows no {scheme}://"
        secure = " with TLS" if _URL_SCHEMES[scheme] else ""
        return f"leave out {scheme}:// and write {_written_for(rest)}{secure}"
    if colon and scheme in _SCHEMES:
        return None if rest.strip("/") else f"nothing follows {scheme}:"
    return _reason_of_host(address)


def _written_for(rest: str) -> str:
    """What to write for a page's address, of which `rest` follows the scheme: host and port, as far as it has them."""
    host = rest.strip("/").partition("/")[0]
    if _reason_of_host(host) is None:
        return host
    return f"{host}:PORT" if _reason_of_host(f"{host}:1") is None else "HOST:PORT"


def _reason_of_host(address: str) -> str | None:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return "it has no port" if address else "it is empty"
    if not host:
        return "it has no host"
    if not (port.isascii() and port.isdigit()):
        return f"{port!r} is no port"
    if not 0 < int(port) < 65536:
        return "ports are 1 to 65535"
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed and not set(host) & set(",/"):
        return "an IPv6 address stands in brackets"
    if set(host) & set(" \t\r\n,/"):
        return f"{host!r} is no host"
    return None
