"""The replicas of the application: a target, a draft, a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.runtime import end_tasks
from outrider.telemetry import names as telemetry
from outrider.telemetry.tracing import set_up_tracing
from outrider_gateway.server import application_for, targets_of
from outrider_gateway.shared_state import SharedState
from outrider_ray.config import FleetConfig, ServedWeights, as_environment
from outrider_ray.figures import ServiceFigures, draft_figures, target_figures
from outrider_ray.replicas import RunningReplicas
from outrider_ray.service_process import ServiceProcess

logger = logging.getLogger(__name__)


class DraftReplica:
    """A draft service. Serve calls these methods."""

    async def __init__(self, config: FleetConfig) -> None:  # type: ignore[misc]
        """Raises `ServiceEnded` for a service that does not start."""
        self._service = await ServiceProcess.start(
            "draft", "draft_service", config.draft_environment(), config.access()
        )
        self._figures = ServiceFigures(self._service.metrics)

    async def address(self) -> str:
        return self._service.address

    async def check_health(self) -> None:
        await self._service.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return draft_figures(*await self._figures.read())

    async def __del__(self) -> None:
        # Without one, its start has failed.
        if (service := getattr(self, "_service", None)) is not None:
            await service.stop()


class TargetReplica:
    """A target service, and the file of the drafts that it uses. Serve calls these methods."""

    async def __init__(self, config: FleetConfig, drafts: Any = None) -> None:  # type: ignore[misc]
        """`drafts` is the handle of the deployment of drafts, if there is one. Raises `ServiceEnded` for a service that
        does not start."""
        self._leave = contextlib.AsyncExitStack()
        self._weights: ServedWeights | None = None
        environment = config.target_environment()
        if drafts is not None:
            folder = Path(self._leave.enter_context(tempfile.TemporaryDirectory(prefix="outrider-drafts-")))
            listed = folder / "drafts"
            found = RunningReplicas("Draft", drafts)
            await _list_drafts(found, listed)
            environment |= as_environment("target", {"draft": f"file:{listed}"})
            following = asyncio.create_task(_follow_drafts(found, listed))
            self._leave.push_async_callback(end_tasks, following)
        self._service = await ServiceProcess.start("target", "target_service", environment, config.access())
        self._leave.push_async_callback(self._service.stop)
        self._figures = ServiceFigures(self._service.metrics)

    async def address(self) -> str:
        return self._service.address

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Serve the weights that the application names, before this replica takes requests and at each change. Raises
        what an update raises, and `ValueError` where the model's own are wanted back: Serve replaces the replica then,
        by one that has them."""
        wanted = ServedWeights.of(user_config)
        if wanted == self._weights:
            return
        if wanted is None:
            raise ValueError("a target does not keep the weights that it started with")
        async with self._service.client() as client:
            updated = await client.update_weights(folder=wanted.folder, running=wanted.running)
        self._weights = wanted
        logger.info("serving weights %s as version %d", wanted.folder, updated.model_version)

    async def check_health(self) -> None:
        await self._service.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return target_figures(*await self._figures.read())

    async def __del__(self) -> None:
        await self._leave.aclose()


class GatewayReplica:
    """The gateway's application behind Serve's proxies, its targets those of the deployment."""

    def __init__(self, config: FleetConfig, targets: Any) -> None:
        """`targets` is the handle of the deployment of targets."""
        self._config, self._targets = config, targets

    def __serve_build_asgi_app__(self) -> ASGIApp:
        gateway = self._config.gateway_config()
        tracing = set_up_tracing(telemetry.GATEWAY_SERVICE, gateway.otlp_endpoint, ratio=gateway.trace_ratio)
        source = RunningReplicas("Target", self._targets)
        targets = targets_of(gateway, self._config.access(), tracing, [source])
        application = application_for(gateway, targets, SharedState.of_one_process(gateway))

        @contextlib.asynccontextmanager
        async def lifespan() -> AsyncIterator[None]:
            async with targets:
                yield
            await asyncio.to_thread(tracing.shutdown)

        return _with_lifespan(application.asgi, lifespan())


def _with_lifespan(app: ASGIApp, lifespan: contextlib.AbstractAsyncContextManager[None]) -> ASGIApp:
    """`app` between a server's startup and its shutdown (ASGI's lifespan protocol)."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        await receive()
        async with lifespan:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    return application


async def _list_drafts(found: RunningReplicas, listed: Path) -> None:
    """Write the addresses of the drafts, if they have changed. None at all is a cluster that changes, so the file keeps
    those that it has: one that is gone costs nothing."""
    addresses = await found.addresses()
    text = "".join(f"{address}\n" for address in addresses)
    if not listed.exists() or (addresses and listed.read_text() != text):
        written = listed.with_suffix(".next")
        written.write_text(text)
        written.replace(listed)


async def _follow_drafts(found: RunningReplicas, listed: Path) -> None:
    while True:
        # Between two looks at which drafts there are. As long as gateways take for targets by default.
        await asyncio.sleep(2.0)
        await _list_drafts(found, listed)
