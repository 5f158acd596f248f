"""`python -m outrider.healthcheck ADDRESS`: exit 0 when the service is ready for calls, or, with --service liveness,
when its process is live. For containers' health checks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.addresses import address_problem, proxy_options
from outrider.limits import TENANT_WORD, lines_of_words
from outrider.pem import check_authority
from outrider.settings import CommandParser, SettingsError
from outrider.unreachable import cause_of

# Service names for probes. A service's own name and "", which clients and load balancers use, mean readiness.
LIVENESS, READINESS = "liveness", "readiness"


def check(address: str, service: str = "", *, timeout: float = 3.0, ca: str = "", tokens: str = "") -> str:
    """The status of `service`, or of `LIVENESS` or `READINESS`: SERVING, NOT_SERVING, or the gRPC status of a call that
    failed, with the cause where no connection was made. `ca` is a file of PEM roots and makes the call use TLS;
    `tokens` is a service's own file of `TOKEN TENANT` lines, whose first token is sent. Raises `SettingsError` for a
    file of tokens that cannot be read or holds none."""
    metadata = [("authorization", f"Bearer {_first_token(tokens)}")] if tokens else []
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes()) if ca else None
    options = proxy_options(address)
    plain, secure = grpc.insecure_channel, grpc.secure_channel
    with secure(address, credentials, options) if credentials else plain(address, options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            # Without `wait_for_ready`, which would hide the cause behind the deadline.
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            status = str(error.code().name)
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return status
            return f"{status}: {cause_of(error.details() or '')[0]}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _first_token(path: str) -> str:
    for _, words in lines_of_words(path):
        if words[0] != TENANT_WORD:
            return words[0]
    raise SettingsError("it holds no token")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when serving, 1 otherwise."""
    parser = CommandParser(prog="python -m outrider.healthcheck", description=__doc__)
    parser.add_argument("address", help="HOST:PORT or unix:PATH")
    parser.add_argument("--service", default="", help="liveness, readiness or a full service name (default: readiness)")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to wait (default: 3)")
    parser.add_argument("--ca", default="", help="PEM roots of the server's certificate (default: plain text)")
    parser.add_argument("--tokens", default="", help="file of `TOKEN TENANT` lines, for services that ask for one")
    flags = parser.parse_args(arguments)
    problem = address_problem(flags.address)
    if problem is not None:
        parser.error(problem)
    for flag, path, check_file in (("--ca", flags.ca, check_authority), ("--tokens", flags.tokens, _first_token)):
        try:
            if path:
                check_file(path)
        except SettingsError as error:
            parser.error(f"{flag}: {error}")
    status = check(flags.address, flags.service, timeout=flags.timeout, ca=flags.ca, tokens=flags.tokens)
    sys.stdout.write(f"{flags.address}: {status}\n")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
