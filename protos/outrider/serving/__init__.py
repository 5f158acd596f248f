"""Server plumbing that both services share: one way to listen, to authenticate, to fail, and to stop.

    server = GrpcServer(ServingOptions(listen=...), [Service(full_name, add)])
    await server.start()
    status = await serve_until_stopped(server, worker, drain_seconds=30)

With something to load first, `Service(full_name)` and `load_and_serve`, which opens the port before.

Servicers raise `OutriderError`; they ask `current_tenant()` who calls. Handlers may be coroutines that call
`context.write` (preferred: what they hold is freed at once on cancellation) or async generators.
"""

from outrider.serving.credentials import TlsFiles
from outrider.serving.lifecycle import load_and_serve, serve_until_stopped
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
    "serve_until_stopped",
]
