"""Who calls, from the headers of a request: what is passed on to the target, which alone decides what it is worth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.context import Context

from outrider.telemetry.tracing import context_from_metadata
from outrider_gateway.failures import Refused

# Of a key or a trace. Chosen.
_MAX_BYTES = 4096
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class HttpCaller:
    """A caller's token, tenant and trace context; each may be empty."""

    token: str
    tenant: str
    context: Context

    def key(self, conversation: str) -> str:
        """What keeps the requests of one of the caller's conversations on one target."""
        return f"{self.token}\0{self.tenant}\0{conversation}"


def caller_from(headers: Headers) -> HttpCaller:
    """The caller of a request. Raises `Refused` for credentials that cannot be passed on."""
    token = tenant = ""
    trace: list[tuple[str, str]] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Refused(401, "only bearer tokens are taken", kind="authentication_error", code="invalid_api_key")
            token = _printable(given.strip(), 401, "the bearer token")
        elif name == b"x-api-key":
            # As Anthropic's clients send a token.
            token = token or _printable(value.strip(), 401, "the header x-api-key")
        elif name == b"outrider-tenant":
            tenant = _printable(value, 400, "the header outrider-tenant")
        elif name in (b"traceparent", b"tracestate"):
            trace.append((name.decode(), value.decode("latin-1")))
    return HttpCaller(token, tenant, context_from_metadata(trace) if trace else Context())


def _printable(value: bytes, status: int, what: str) -> str:
    """gRPC carries printable ASCII only."""
    if len(value) > _MAX_BYTES or any(not 0x20 <= byte < 0x7F for byte in value):
        raise Refused(status, f"{what} must be at most {_MAX_BYTES} characters of printable ASCII")
    return value.decode("ascii")
