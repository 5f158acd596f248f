"""What all requests of a gateway share, whichever of its processes answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.admission.pacing import RefusalPace
from outrider.admission.shares import PEER_FACTOR, TENANT_FACTOR, HolderCounts, OwnCounts, Shares
from outrider_gateway.config import GatewayConfig
from outrider_gateway.connections import HEALTH_CONNECTIONS
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.stored_responses import StoredResponse, StoredResponses

_FACTORS = {"tenant": TENANT_FACTOR, "peer": PEER_FACTOR}


class ResponseStore(Protocol):
    """Keeps responses; see `StoredResponses`, whose methods these are."""

    async def put(self, tenant: str, response_id: str, response: StoredResponse) -> bool: ...
    async def get(self, tenant: str, response_id: str) -> StoredResponse | None: ...
    async def delete(self, tenant: str, response_id: str) -> bool: ...


@dataclass(frozen=True)
class SharedState:
    """Places of what there is a limit of, the pace of refusals, kept responses, and the page of metrics."""

    places: SharedPlaces
    pace: RefusalPace
    responses: ResponseStore
    # Of the process's own metrics.
    metrics_page: Callable[[GatewayMetrics], Awaitable[bytes]]

    @classmethod
    def of_one_process(cls, config: GatewayConfig) -> SharedState:
        """The state of a gateway that is one process."""
        places = SharedPlaces.of(config, lambda _most: OwnCounts())
        responses = StoredResponses(config.stored_response_bytes, config.stored_response_seconds)
        return cls(places, RefusalPace(config.max_connections), responses, GatewayMetrics.page)


@dataclass(frozen=True)
class SharedPlaces:
    """The shares of a gateway, over counts of some kind. `idle` counts connections without a request, by peer."""

    answers: Shares
    body_bytes: Shares
    connections: Shares
    idle: HolderCounts

    @classmethod
    def of(cls, config: GatewayConfig, counts_of: Callable[[int], HolderCounts]) -> SharedPlaces:
        """`counts_of` makes counts of at most so many holders, and is called in the same order in every process."""
        # Of each kind, every use may have another holder.
        answering, connected = len(_FACTORS) * config.max_running, len(_FACTORS) * most_connections(config)
        return cls(
            Shares("answers", config.max_running, _FACTORS, counts_of(answering)),
            Shares("bytes of bodies", config.max_pending_bytes, _FACTORS, counts_of(connected)),
            Shares("connections", config.max_connections, {"peer": PEER_FACTOR}, counts_of(connected)),
            counts_of(connected),
        )


def most_connections(config: GatewayConfig) -> int:
    """Connections at most, with those for health alone."""
    return config.max_connections + HEALTH_CONNECTIONS
