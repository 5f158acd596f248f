"""The process of the service that a replica looks after."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping

import ray

from outrider.addresses import address_at
from outrider.ports import free_port
from outrider.processes.python import module_command
from outrider_client.client import Client
from outrider_client.local.process import Child, ServiceDied, ServiceSlow, wait_serving
from outrider_client.local.supervisor import STOP_SECONDS
from outrider_client.terminal.options import AccessOptions
from outrider_ray.config import as_environment


class ServiceEnded(Exception):
    """The service ended, or does not serve: why, with the end of its log."""


class ServiceProcess:
    """A service under its replica, which ends with it. `address` is where other nodes reach it, `metrics` the loopback
    address of its metrics."""

    def __init__(self, name: str, access: AccessOptions, address: str, metrics: str) -> None:
        self.address, self.metrics = address, metrics
        self._name, self._access = name, access
        self._tail = deque[str](maxlen=20)
        self._child: Child

    @classmethod
    async def start(
        cls, name: str, module: str, environment: Mapping[str, str], access: AccessOptions
    ) -> ServiceProcess:
        """Start a service and return once it is healthy. `name` is the section of its settings, which are in
        `environment`. Raises `ServiceEnded` for one that ended, or was not healthy after an hour."""
        hosts = ray.util.get_node_ip_address(), "127.0.0.1"
        service = cls(name, access, *(address_at(host, free_port(host)) for host in hosts))
        placed = as_environment(name, {"listen": service.address, "metrics_listen": service.metrics})
        service._child = await Child.start(name, module_command(module), service._log, {**environment, **placed})
        try:
            token, tls = access.secret(), access.tls_options()
            # A large model loads and captures its steps for minutes; nothing is lost by waiting for it longer.
            await wait_serving(service._child, service.address, 3600.0, token, tls)
        except (ServiceDied, ServiceSlow) as error:
            await service.stop()
            raise service._ended(str(error)) from None
        return service

    def client(self) -> Client:
        """A client of it. Close it."""
        return Client(self._access.connection(self.address))

    async def check(self) -> None:
        """Raises `ServiceEnded` unless it runs and reports SERVING."""
        if self._child.status is not None:
            raise self._ended(str(ServiceDied(self._name, self._child.status)))
        async with self._access.connection(self.address) as connection:
            if not await connection.serving(timeout=5.0):
                raise self._ended(f"the {self._name} service does not report SERVING")

    async def stop(self) -> None:
        """Let it drain and end, for as long as services take at most."""
        if self._child.status is None:
            await self._child.stop(STOP_SECONDS)

    def _log(self, line: str) -> None:
        # Ray collects what its workers write.
        sys.stderr.write(f"{self._name}: {line}\n")
        self._tail.append(line)

    def _ended(self, reason: str) -> ServiceEnded:
        return ServiceEnded("\n".join([reason, *self._tail]))
