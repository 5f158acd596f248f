"""Server plumbing that both services share: one way to listen, to authenticate, to fail, and to stop.

    server = GrpcServer(ServingOptions(listen=...), [Service(full_name, add)])
    await server.start()
    status = await serve_until_stopped(server, worker, drain_seconds=30)

With something to load first, `Service(full_name)` and `load_and_serve`, which opens the port before.

Servicers raise `OutriderError`; they ask `current_tenant()` who calls. Handlers may be coroutines that call
`context.write` (preferred: what they hold is freed at once on cancellation) or async generators.
"""

from outrider.serving.credentials import TlsFiles
from outrider.serving.health import HealthServicer
from outrider.serving.interceptors import AuthInterceptor, ErrorInterceptor, guarded
from outrider.serving.lifecycle import Worker, load_and_serve, serve_until_stopped
from outrider.serving.server import GrpcServer, Service, ServingOptions, check_free
from outrider.serving.tenancy import TENANT_KEY, Authenticator, Caller, current_caller, current_tenant

__all__ = [
    "TENANT_KEY",
    "AuthInterceptor",
    "Authenticator",
    "Caller",
    "ErrorInterceptor",
    "GrpcServer",
    "HealthServicer",
    "Service",
    "ServingOptions",
    "TlsFiles",
    "Worker",
    "check_free",
    "current_caller",
    "current_tenant",
    "guarded",
    "load_and_serve",
    "serve_until_stopped",
]
