"""Which host names the gateway answers to (`outrider.host_names` has the reason), and the refusal of others."""

from __future__ import annotations

import logging
import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.host_names import HostNames, is_loopback
from outrider.log_limit import LogLimit
from outrider_gateway.config import MAX_HOST, GatewayConfig, host_and_port
from outrider_gateway.failures import Refused
from outrider_gateway.http import send_json

logger = logging.getLogger(__name__)


class HostCheck:
    """Refuses requests for other names, before anything else looks at them. Requests without the header pass, as probes
    of HTTP/1.0 send them: every browser names the host."""

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self._app = app
        self.names = names
        self._limit = LogLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope["headers"]:
            if name == b"host" and value and not self.names.answers(host := value.decode("latin-1")):
                if self._limit.due() is not None:
                    # Without what the caller wrote.
                    peer = (scope.get("client") or ("a socket",))[0]
                    logger.warning(
                        "refused a request from %s for a host that is not served: --allow-host lists more", peer
                    )
                refused = _refusal(host)
                await send_json(send, refused.status, refused.body(), uuid.uuid4().hex)
                return
        await self._app(scope, receive, send)


def host_check(app: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """`app` behind the check, where one is wanted. A page cannot show a certificate for its own name, so TLS needs
    none. A gateway that others reach by its address, and that lists no names, may have any."""
    listen, _ = host_and_port(config.listen)
    if "*" in config.hosts or config.tls_certificate or not (config.hosts or is_loopback(listen)):
        return app
    return HostCheck(app, HostNames.of_listener(listen, *config.hosts))


def _refusal(host: str) -> Refused:
    name = host.rpartition(":")[0] or host
    known = f"{name!r}" if len(name) <= MAX_HOST else "a name of that length"
    problem = f"this server does not answer to the name {known}"
    hint = "if it is one of its names, start the gateway with --allow-host NAME, or OUTRIDER_GATEWAY_ALLOW_HOST"
    return Refused(403, f"{problem}: {hint}", kind="permission_error", code="host_not_allowed")
