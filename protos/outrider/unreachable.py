"""Why no connection to a service came about, in few words: what gRPC says of it, read for people."""

from __future__ import annotations

from enum import Enum

# How gRPC begins when no connection came about; what breaks later comes without it.
_NOT_CONNECTED = "failed to connect to all addresses"
_NOT_RESOLVED = "errors resolving"
# A server that expects TLS hangs up on the first bytes of HTTP/2, and one that expects a client's certificate after the
# handshake. A proxy with nobody behind it does so too, so that this is likely and not certain.
_HUNG_UP = ("Socket closed", "Connection reset by peer", "Connection reset by peer (104)")
# What newer releases of gRPC put before it, where the handshake went well on our side.
_SECURE = "Secure read failed"
# What gRPC says of an answer in HTTP/1, which a gateway gives.
_HTTP1 = "http1.x server"
SPEAKS_HTTP = "it speaks HTTP/1 and no gRPC, as a gateway does"


class TlsProblem(Enum):
    """What is likely wrong where somebody listens and no connection comes about."""

    EXPECTED = "the server seems to expect TLS, or a client's certificate"
    NOT_SPOKEN = "we speak TLS, and the server does not"
    NOT_TRUSTED = "the server's certificate is not one that we trust"


def cause_of(detail: str) -> tuple[str, TlsProblem | None]:
    """What gRPC means by `detail`, the message of an UNAVAILABLE of its own, in few words; and what is likely wrong."""
    # gRPC repeats itself; what the system said stands last, but for the OK of the step before a failed handshake.
    cause = detail.removesuffix(": OK").rpartition(": ")[2]
    if detail.startswith(_NOT_RESOLVED):
        return f"the name is not resolved: {cause.rstrip(']')}", None
    if "WRONG_VERSION_NUMBER" in detail:
        return "the server does not speak TLS", TlsProblem.NOT_SPOKEN
    if "CERTIFICATE_VERIFY_FAILED" in detail:
        return f"its certificate is not trusted: {cause}", TlsProblem.NOT_TRUSTED
    if "Hostname Verification Check failed" in detail:
        return "its certificate is of another name", TlsProblem.NOT_TRUSTED
    if detail.startswith(_NOT_CONNECTED) and _SECURE in cause:
        return "it ended the TLS handshake, as a server does that asks for a client's certificate", TlsProblem.EXPECTED
    if _HTTP1 in detail:
        return SPEAKS_HTTP, None
    if detail.startswith(_NOT_CONNECTED) and cause.endswith(_HUNG_UP):
        return f"it hung up at once ({cause}), as a server does that speaks TLS", TlsProblem.EXPECTED
    return cause, None
