"""The gRPC server that both services share: how it listens, authenticates, reports errors and stops.

    server = GrpcServer(ServingOptions(listen=...), [Service(full_name)])
    status = await load_and_serve(server, load, drain_seconds=30)

`load` calls `server.provide(full_name, add)`, of which `add` adds the servicer, and returns the `Worker`. Servicers
raise `OutriderError`, and get the caller from `current_tenant()`. Handlers may be coroutines that call `context.write`
(preferred: what they hold is freed at once on cancellation) or async generators.
"""

from outrider.serving.credentials import TlsFiles
from outrider.serving.lifecycle import load_and_serve
from outrider.serving.server import GrpcServer, Service, ServingOptions, check_free
from outrider.serving.tenancy import Authenticator, Caller, current_caller, current_tenant

__all__ = [
    "Authenticator",
    "Caller",
    "GrpcServer",
    "Service",
    "ServingOptions",
    "TlsFiles",
    "check_free",
    "current_caller",
    "current_tenant",
    "load_and_serve",
]
