"""Settings of the gateway. Each default lives here and nowhere else."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from outrider.addresses import address_problem
from outrider.busy_polling import usable_cores
from outrider.pem import check_pair
from outrider.settings import ServerSettings, SettingsError, comma_words, setting
from outrider_gateway.discovery import target_name

# A name as DNS has it, without a port; with a dot before it, every name below it too.
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
# Of a name by RFC 1035.
MAX_HOST = 253
# Whether connections can be handed to another process, as everywhere but on Windows.
CAN_SHARE = hasattr(socket, "send_fds")


@dataclass(frozen=True)
class GatewayConfig(ServerSettings):
    """Everything `outrider gateway` takes, by flag, environment (`OUTRIDER_GATEWAY_*`) or `[gateway]` table."""

    target: str = setting(
        "127.0.0.1:50051",
        "target services, with commas between: HOST:PORT, unix:PATH, or dns:///HOST:PORT for every address of a name",
    )
    listen: str = setting("127.0.0.1:8000", "HOST:PORT to serve HTTP on")
    # Chosen.
    workers: int = setting(
        0, "processes that answer, behind one port; 0 chooses by the cores that there are", ge=0, le=64
    )
    page: bool = setting(True, "serve the chat page at /")
    allow_host: str = setting("", "names that clients know this server by, commas between; .a.example has all below")
    allow_origin: str = setting("", "origins whose pages may call, such as https://a.example, commas between; * is any")

    max_running: int = setting(1024, "answers being written at once; requests for more are refused with 429", ge=1)
    max_choices: int = setting(16, "answers that one request may ask for", ge=1)
    max_body_bytes: int = setting(4 * 1024 * 1024, "largest request body", ge=1)
    max_pending_bytes: int = setting(
        64 * 1024 * 1024, "bytes of bodies beyond the first 64 KiB of each, of requests under way together", ge=1
    )
    stored_response_bytes: int = setting(
        64 * 1024 * 1024,
        "bytes of kept responses, of which a tenant gets a quarter at most; 0 keeps none",
        ge=0,
    )
    stored_response_seconds: float = setting(3600.0, "time that a response is kept", ge=0)
    max_connections: int = setting(1024, "connections at once; more are refused with 503", ge=1)
    body_seconds: float = setting(30.0, "time a request's body may take to arrive", gt=0)
    request_seconds: float = setting(
        1800.0, "time from a request's arrival until it is given up; 0 waits for ever", ge=0
    )
    drain_seconds: float = setting(30.0, "time running answers get after SIGTERM", ge=0)

    health_seconds: float = setting(2.0, "time between two looks at the health of a target", gt=0)
    target_start_seconds: float = setting(
        0.0, "time from the gateway's start in which a target that is not reached yet is being started", ge=0
    )
    load_bound: float = setting(
        1.25, "load that a target may have, as a multiple of the mean, before tenants move on", ge=1
    )

    log_requests: bool = setting(
        False, "log a line for each request that ends, at level info: status, tokens, time, drafted share, and no text"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for address in self.targets:
            problem = address_problem(address) or _name_problem(address)
            _need(problem is None, "target", problem or "")
        _need(len(set(self.targets)) == len(self.targets), "target", "names a target twice")
        for origin in self.origins:
            # As browsers write the origin of a page: in lower case, without a path.
            known = re.fullmatch(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?", origin)
            _need(
                origin == "*" or known is not None,
                "allow_origin",
                f"{origin!r} is not SCHEME://HOST[:PORT] in lower case, nor *",
            )
        _need("*" not in self.origins or len(self.origins) == 1, "allow_origin", "* stands alone")
        for host in self.hosts:
            named = len(host) <= MAX_HOST and re.fullmatch(rf"\.?{_LABEL}(\.{_LABEL})*", host) is not None
            problem = f"{host!r} is not a name in lower case without port, nor .DOMAIN, nor *"
            _need(host == "*" or named, "allow_host", problem)
        _need("*" not in self.hosts or len(self.hosts) == 1, "allow_host", "* stands alone")
        _need(bool(self.tls_certificate) == bool(self.tls_key), "tls_certificate", "needs --tls-key, and the other way")
        if self.tls_certificate:
            check_pair(self.tls_certificate, self.tls_key)
        host_and_port(self.listen)
        _need(self.workers <= 1 or CAN_SHARE, "workers", "several need Linux or macOS")

    @property
    def processes(self) -> int:
        """Processes that answer: `workers`, or as many as there are cores for."""
        # Without a number of workers: one for so many cores, and so many at most. Chosen: target, engine and clients
        # have the other cores, and each worker takes some 60 MB.
        return self.workers or min(4, max(1, int(usable_cores() // 4))) if CAN_SHARE else 1

    @property
    def targets(self) -> tuple[str, ...]:
        return comma_words(self.target)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names that clients may use beside this machine's own; "*" alone for all."""
        return comma_words(self.allow_host)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origin of every other page that may call; "*" alone for all."""
        return comma_words(self.allow_origin)


def host_and_port(listen: str) -> tuple[str, int]:
    """The two parts of HOST:PORT, brackets of IPv6 removed. Raises `SettingsError`."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"--listen: {listen!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _name_problem(address: str) -> str | None:
    try:
        target_name(address)
    except ValueError as error:
        return str(error)
    return None


def _need(ok: bool, name: str, problem: str) -> None:
    if not ok:
        raise SettingsError(f"--{name.replace('_', '-')}: {problem}")
