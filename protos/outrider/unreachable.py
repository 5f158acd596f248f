"""Why no connection to a service was made, in few words: gRPC's error messages made readable."""

from __future__ import annotations

import os
from enum import Enum

from outrider.addresses import is_local

# gRPC's prefix when no connection was made; connections that break later have none.
_NOT_CONNECTED = "failed to connect to all addresses"
SPEAKS_NO_HTTP2 = "it speaks no HTTP/2, and so no gRPC"
SPEAKS_HTTP = "it speaks HTTP/1 and no gRPC, as a gateway does"


class TlsProblem(Enum):
    """The likely TLS problem where a server listens but no connection is made."""

    EXPECTED = "the server seems to expect TLS, or a client's certificate"
    NOT_SPOKEN = "we speak TLS, and the server does not"
    NOT_TRUSTED = "the server's certificate is not one that we trust"


def proxy_hint(address: str) -> str:
    """How a channel to this address goes through a proxy; empty where none is named, or the address is local."""
    # What names a proxy to gRPC, the first of them that is set.
    name = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), "")
    return (
        f" (gRPC takes the proxy of {name}, unless no_proxy names the host)" if name and not is_local(address) else ""
    )


def cause_of(detail: str) -> tuple[str, TlsProblem | None]:
    """The cause in the message of gRPC's own UNAVAILABLE, in few words, and the likely TLS problem, if any."""
    # The system's error stands last, but for the OK of the step before a failed handshake.
    cause = detail.removesuffix(": OK").rpartition(": ")[2]
    if detail.startswith("errors resolving"):
        return f"the name is not resolved: {cause.rstrip(']')}", None
    if "WRONG_VERSION_NUMBER" in detail:
        return "the server does not speak TLS", TlsProblem.NOT_SPOKEN
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return f"its certificate is not trusted: {cause}", TlsProblem.NOT_TRUSTED
    if "Hostname Verification Check failed" in detail:
        return "its certificate is of another name", TlsProblem.NOT_TRUSTED
    # Prefix in newer releases of gRPC if the handshake succeeded on our side.
    if detail.startswith(_NOT_CONNECTED) and "Secure read failed" in cause:
        return "it ended the TLS handshake, as a server does that asks for a client's certificate", TlsProblem.EXPECTED
    # In gRPC's message about a response in HTTP/1, such as a gateway's.
    if "http1.x server" in detail:
        return SPEAKS_HTTP, None
    # In gRPC's message about anything else that is no HTTP/2.
    if "Failed parsing HTTP/2" in detail:
        return SPEAKS_NO_HTTP2, None
    # A server that expects TLS closes the connection on the first bytes of HTTP/2, and one that expects a client
    # certificate after the handshake. A proxy without a backend does so too, so the cause is likely and not certain.
    if detail.startswith(_NOT_CONNECTED) and cause.endswith(
        ("Socket closed", "Connection reset by peer", "Connection reset by peer (104)")
    ):
        return f"it hung up at once ({cause}), as a server does that speaks TLS", TlsProblem.EXPECTED
    return cause, None
