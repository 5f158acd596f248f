"""The parent of a gateway's workers: accepts connections and hands each to a worker, keeps responses, sums what is
counted, and starts a worker again that has died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket

from outrider.log_limit import LogLimit
from outrider.runtime import end_tasks
from outrider.settings import SettingsError
from outrider_client.local.supervisor import FIRST_BACKOFF, HEALTHY_AFTER, LONGEST_BACKOFF
from outrider_client.terminal.options import AccessOptions
from outrider_gateway.config import GatewayConfig
from outrider_gateway.peers import peer_name
from outrider_gateway.server import address_of, listen, raise_file_limit
from outrider_gateway.stored_responses import StoredResponse, StoredResponses
from outrider_gateway.workers import messages
from outrider_gateway.workers.child import WorkerChild
from outrider_gateway.workers.places import PlacesInMemory, memory_bytes
from outrider_gateway.workers.shared_memory import SharedMemory
from outrider_gateway.workers.totals import WorkerTotals

logger = logging.getLogger(__name__)
# Beyond `drain_seconds`, for a worker to end.
_STOP_SECONDS = 5.0


class GatewayParent:
    """Use it with `async with`: inside, workers answer at `address`."""

    def __init__(self, config: GatewayConfig, access: AccessOptions, workers: int) -> None:
        self._config, self._access, self._workers = config, access, workers
        self._secret = secrets.token_bytes(16)
        self._memory = SharedMemory.create(memory_bytes(config, workers))
        self._places = PlacesInMemory.of(config, workers, None, self._memory, self._secret)
        self._responses = StoredResponses(config.stored_response_bytes, config.stored_response_seconds)
        self._totals = WorkerTotals()
        self._children: dict[int, WorkerChild] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._counted = asyncio.Event()
        self._limit = LogLimit()
        self._accepting = False
        # By place: why a worker could not start, nothing for one that serves.
        self._first: list[asyncio.Future[str]] = []
        self._last = 0
        self._stopping = asyncio.Event()
        self.address = ""

    async def __aenter__(self) -> GatewayParent:
        raise_file_limit(self._config)
        self._listening = listen(self._config.listen)
        self._listening.setblocking(False)
        self.address = address_of(self._listening)
        self._first = [asyncio.get_running_loop().create_future() for _ in range(self._workers)]
        self._keeping = [asyncio.create_task(self._keep(place)) for place in range(self._workers)]
        try:
            refused = [reason for reason in await asyncio.gather(*self._first) if reason]
            if refused:
                raise SettingsError(refused[0])
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    def drain(self, *, at_once: bool = False) -> None:
        """Accept no more, and have workers end when their answers have ended, or `at_once`."""
        self._stopping.set()
        self._accept_no_more()
        self._listening.close()
        for child in self._children.values():
            child.send(messages.Drain(at_once))

    @property
    def draining(self) -> bool:
        return self._stopping.is_set()

    async def ended(self) -> None:
        """Wait until all workers have ended, which `drain` asks for."""
        await asyncio.gather(*self._keeping)

    async def _leave(self) -> None:
        self.drain()
        try:
            await asyncio.wait_for(self.ended(), self._config.drain_seconds + _STOP_SECONDS)
        except Exception:
            # They hang, or have failed.
            await end_tasks(*self._keeping)
        for child in self._children.values():
            child.close()

    # Workers.

    async def _keep(self, place: int) -> None:
        """Keep a worker running, unless it ends before it has ever served."""
        loop, backoff = asyncio.get_running_loop(), FIRST_BACKOFF
        while not self._stopping.is_set():
            child = WorkerChild(place, self._on_message)
            begun = loop.time()
            self._children[place] = child
            configure = messages.ConfigureWorker(
                self._config, self._access, place, self._workers, self._secret, self._memory.size
            )
            await child.start(configure, self._memory.descriptor)
            await child.ended()
            lost, status = self._lost(place), await child.status()
            if not self._first[place].done():
                self._first[place].set_result(child.refused or f"a worker ended with status {status} before it served")
                return
            backoff = FIRST_BACKOFF if loop.time() - begun > HEALTHY_AFTER else min(2 * backoff, LONGEST_BACKOFF)
            why = child.refused or f"it ended with status {status}"
            if not self._stopping.is_set():
                logger.error("worker %d is lost, with %d connections: %s; it starts again", place, lost, why)
            await self._until_draining(backoff)

    async def _until_draining(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _lost(self, place: int) -> int:
        """A worker has ended: give back what it held. Returns its connections."""
        connections = self._places.connected.taken_by(place)
        self._totals.end(place)
        self._places.clear(place)
        return connections

    def _on_message(self, child: WorkerChild, message: messages.FromWorker) -> None:
        if isinstance(message, messages.Counted):
            self._totals.put(child.place, message.figures)
            child.counting = child.counting and not message.asked
            self._counted.set()
        elif isinstance(message, messages.Serving):
            if self._first[child.place].done():
                logger.info("worker %d serves again", child.place)
            else:
                self._first[child.place].set_result("")
            self._accept_more()
        elif not isinstance(message, messages.WorkerRefused):
            task = asyncio.create_task(self._answer(child, message))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _answer(
        self, child: WorkerChild, message: messages.Keep | messages.Find | messages.Delete | messages.AskPage
    ) -> None:
        value: bool | bytes | StoredResponse | None
        if isinstance(message, messages.Keep):
            value = await self._responses.put(message.tenant, message.response_id, message.response)
        elif isinstance(message, messages.Find):
            value = await self._responses.get(message.tenant, message.response_id)
        elif isinstance(message, messages.Delete):
            value = await self._responses.delete(message.tenant, message.response_id)
        else:
            value = await self._page()
        child.send(messages.ParentAnswer(message.call, value))

    async def _page(self) -> bytes:
        """What all have counted by now."""
        serving = self._serving()
        for child in serving:
            child.counting = True
            child.send(messages.AskFigures())
        with contextlib.suppress(TimeoutError):
            # For workers to count, when a scrape asks; the last count stands for one that takes longer.
            async with asyncio.timeout(2.0):
                while any(child.counting and child.serving for child in serving):
                    self._counted.clear()
                    await self._counted.wait()
        return self._totals.page([os.getpid(), *(child.pid for child in serving if child.serving)])

    def _serving(self) -> list[WorkerChild]:
        return [child for child in self._children.values() if child.serving]

    # Connections.

    def _accept_more(self) -> None:
        if not self._accepting and not self.draining and len(self._serving()):
            self._accepting = True
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept_no_more(self) -> None:
        if self._accepting:
            self._accepting = False
            asyncio.get_running_loop().remove_reader(self._listening)

    def _accept(self) -> None:
        # Connections that are accepted before anything else is looked at.
        for _ in range(64):
            serving = self._serving()
            if not serving:
                # They wait until one serves again.
                self._accept_no_more()
                return
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._limit.due() is not None:
                    logger.error("cannot accept a connection: %s", error.strerror)
                self._accept_no_more()
                # No descriptor is left. Until the next try, as asyncio's own servers have it.
                asyncio.get_running_loop().call_later(1.0, self._accept_more)
                return
            with connection:
                self._hand_over(connection, peer_name(address[0] if address else ""), serving)

    def _hand_over(self, connection: socket.socket, peer: str, serving: list[WorkerChild]) -> None:
        """Hand a connection to the worker with the fewest, or, where an idle one has to make way for it, to a worker
        that has such; or to another, where that one does not take it. It is closed where none does."""
        self._last += 1
        fewest = min(serving, key=lambda one: (self._held_by(one), (one.place - self._last) % self._workers))
        first = self._with_idle(peer, serving) or fewest
        # So the next one finds room, and goes to the worker with the fewest: one that has started again got none while
        # idle ones had all places.
        make_room = self._held_by(first) > self._held_by(fewest) + 1
        for child in sorted(serving, key=lambda one: one is not first):
            if child.hand_over(connection, make_room=make_room):
                return
        if self._limit.due() is not None:
            logger.error("no worker takes connections: one is closed")

    def _held_by(self, child: WorkerChild) -> int:
        """Connections that a worker has, and that are on their way to it."""
        return self._places.connected.taken_by(child.place) + child.handed - self._places.adopted.integers[child.place]

    def _with_idle(self, peer: str, serving: list[WorkerChild]) -> WorkerChild | None:
        """The worker that has most of those connections of which one has to make way for one of this peer. None where
        there is room, or no such connection."""
        idle = self._places.idle
        if self._places.places.connections.has_room(peer=peer):
            return None
        place, count = idle.most_held_by("peer", peer)
        if not count:
            place = max(range(self._workers), key=idle.taken_by)
            count = idle.taken_by(place)
        return next((one for one in serving if count and one.place == place), None)
