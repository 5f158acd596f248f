"""How many connections a peer may have: idle ones make way for others, and health is answered while all are busy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.admission.shares import PEER_FACTOR, HolderCounts, Shares
from outrider.errors import QuotaExceeded
from outrider.log_limit import LogLimit
from outrider_gateway.failures import Refused
from outrider_gateway.http import send_json
from outrider_gateway.http_versions import HttpProtocol
from outrider_gateway.peers import peer_name

logger = logging.getLogger(__name__)
# Connections beyond the limit, for health alone. Chosen: probes are few, and each is answered at once.
HEALTH_CONNECTIONS = 16


class Connections:
    """The connections of all peers. Where a peer has as many as it may, or all together, its longest idle one is closed
    for a further one; where none is idle, the further one is for health alone, and the oldest of these makes way."""

    def __init__(self, shares: Shares, idle: HolderCounts) -> None:
        """`idle` counts those of each peer that are idle, for who chooses a process for a connection."""
        self._shares, self._idle_counts = shares, idle
        # By peer, the longest idle first. Idle: no request is being read or answered.
        self._idle: dict[str, OrderedDict[GatewayProtocol, None]] = {}
        # Those for health alone, the oldest first.
        self._beyond: OrderedDict[GatewayProtocol, None] = OrderedDict()
        self._limit = LogLimit()

    def add(self, connection: GatewayProtocol) -> bool:
        """Whether the connection has a place; otherwise it is for health alone."""
        peer = connection.peer
        if self._reserved(peer):
            return True
        if (idle := next(self._making_way(peer), None)) is not None:
            self._close(idle)
            if self._reserved(peer):
                return True
        if (others := self._limit.due()) is not None:
            logger.warning("too many connections, the last one from %s (and %d others)", peer, others)
        if len(self._beyond) >= HEALTH_CONNECTIONS:
            oldest, _ = self._beyond.popitem(last=False)
            oldest.transport.close()
        self._beyond[connection] = None
        return False

    def make_room(self, peer: str) -> None:
        """Close an idle connection in place of which this peer can have a further one elsewhere, unless there is a
        place: the longest idle of those that were answered, since others may be about to ask."""
        answered = (one for one in self._making_way(peer) if one.cycle is not None)
        if not self._shares.has_room(peer=peer) and (idle := next(answered, None)) is not None:
            self._close(idle)

    def remove(self, connection: GatewayProtocol) -> None:
        """The connection has ended, or is about to. Nothing for one that is gone already."""
        self._beyond.pop(connection, None)
        if connection.placed:
            connection.placed = False
            self.mark_busy(connection)
            self._shares.give_back(peer=connection.peer)

    def mark_idle(self, connection: GatewayProtocol) -> None:
        """No request is being read or answered from now on."""
        idle = self._idle.get(connection.peer, OrderedDict())
        if connection.placed and connection not in idle:
            self._idle[connection.peer] = idle
            idle[connection] = None
            self._idle_counts.add(1, {"peer": connection.peer})

    def mark_busy(self, connection: GatewayProtocol) -> None:
        """A request has come."""
        idle = self._idle.get(connection.peer)
        if idle is None or connection not in idle:
            return
        del idle[connection]
        self._idle_counts.add(-1, {"peer": connection.peer})
        if not idle:
            del self._idle[connection.peer]

    def _reserved(self, peer: str) -> bool:
        """Reserve a place; whether there was one."""
        with contextlib.suppress(QuotaExceeded):
            self._shares.reserve(peer=peer)
            return True
        return False

    def _close(self, connection: GatewayProtocol) -> None:
        self.remove(connection)
        connection.transport.close()

    def _making_way(self, peer: str) -> Iterator[GatewayProtocol]:
        """The connections that make way for one of this peer, the longest idle first: its own, or, where the peer has
        few and there is no place at all, those of the peer that has most of those with an idle one."""
        if peer not in self._idle and self._shares.taken == self._shares.total and self._held(peer) < PEER_FACTOR:
            peer = max(self._idle, key=self._held, default=peer)
        return iter(self._idle.get(peer, ()))

    def _held(self, peer: str) -> int:
        return self._shares.held("peer", peer)


class GatewayProtocol(HttpProtocol):
    """A connection that has a place among the others', or one for health alone."""

    def __init__(self, connections: Connections, **named: Any) -> None:
        super().__init__(**named)
        self._all = connections
        self.peer = ""
        self.placed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = peer_name(self.client[0] if self.client else "")
        self.placed = self._all.add(self)
        self._all.mark_idle(self)
        if not self.placed:
            self.app = _for_health(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._all.mark_busy(self)
        super().on_headers_complete()
        if not self.placed and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._all.mark_idle(self)


def _for_health(app: ASGIApp) -> ASGIApp:
    """`app` for health, and a refusal for all else."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/health", "/health/ready"):
            await app(scope, receive, send)
            return
        refused = Refused(
            503, "too many connections", kind="server_error", code="too_many_connections", retry_after=1.0
        )
        await send_json(send, refused.status, refused.body(), uuid.uuid4().hex, refused.headers())

    return application
