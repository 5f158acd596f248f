"""A target, a draft, a proxy before each, and somebody who starts again what has ended: what faults are done to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from chaos.liar import LyingDraft, serve_lies
from chaos.proxy import Proxy
from chaos.taught import Taught
from forked import Child

from outrider.errors import OutriderError
from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import info_from_pb
from outrider_client.client import Client
from outrider_client.failures import ServiceUnreachable

VOCABULARY = 211
DRAFTERS = ("trie", "head", "merged")
PLACEMENTS = ("shared", "own")
# A snapshot every so often, so that a full disk meets one.
_TRIE = ("--num-draft-tokens", "8", "--breadth", "2", "--snapshot-seconds", "1", "--min-score", "0.1")
_HEAD = ("--dtype", "float32", "--num-steps", "4", "--topk", "2", "--gumbel-sharpness", "2.0")
_POLL_SECONDS = 0.02
# Of the first start, which may compile. Chosen.
_START_SECONDS = 600.0


def draft_arguments(drafter: str, taught: Taught, folder: Path) -> list[str]:
    """Flags of `python -m draft_service` for one of `DRAFTERS`."""
    trie = ["--snapshot", str(folder / "tries")]
    head = ["--head", str(taught.head)]
    if drafter == "trie":
        return ["--drafter", "trie", *_TRIE, *trie]
    if drafter == "head":
        return ["--drafter", "eagle", *_HEAD, "--num-draft-tokens", "6", *head]
    shared = [*_HEAD, "--num-draft-tokens", "6", *(word for word in _TRIE[2:]), *trie, *head]
    return ["--drafter", "merged", *shared]


@dataclass
class Supervisor:
    """Starts a service again that has ended, after a moment, as an operator's does."""

    child: Child
    pause: float = 0.05
    # Nobody starts it while this is set.
    leave: bool = False
    statuses: list[int | None] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if not self.child.alive and not self.leave:
                self.statuses.append(self.child.status)
                await asyncio.sleep(self.pause)
                self.child.start()


@dataclass
class World:
    """One arrangement of services. `target_proxy` stands between client and target, `draft_proxy` before the draft."""

    taught: Taught
    folder: Path
    drafter: str
    placement: str
    target: Child
    draft: Child
    target_proxy: Proxy
    draft_proxy: Proxy
    liar: LyingDraft
    supervisors: Sequence[Supervisor] = ()
    # Of a caller, where the target asks for one.
    token: str = ""

    def client(self) -> Client:
        return Client.connect(self.target_proxy.address, token=self.token)

    def lie(self, manner: str) -> None:
        """Put the hostile draft in the real one's place."""
        self.liar.manner = manner
        self.draft_proxy.upstream = str(self.folder / "liar.sock")
        self.draft_proxy.cut()

    async def lie_as_the_real_one(self, manner: str, token: str) -> None:
        """As `lie`, of a draft that says of itself what the real one does. `token` is what that asks for."""
        async with grpc.aio.insecure_channel(f"unix:{self.folder}/draft.sock") as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            metadata = (("authorization", f"Bearer {token}"),)
            self.liar.info = info_from_pb(await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), metadata=metadata))
        self.lie(manner)

    def lose_draft(self) -> None:
        """Put nobody in the draft's place."""
        self.draft_proxy.upstream = str(self.folder / "nobody.sock")
        self.draft_proxy.cut()

    def tell_the_truth(self) -> None:
        self.draft_proxy.upstream = str(self.folder / "draft.sock")
        self.draft_proxy.cut()

    def heal(self) -> None:
        """End every fault that has not ended by itself."""
        for proxy in (self.target_proxy, self.draft_proxy):
            proxy.heal()
        if self.draft_proxy.upstream != str(self.folder / "draft.sock"):
            self.tell_the_truth()
        for child in (self.target, self.draft):
            if child.alive:
                child.fill_disk(False)
        for supervisor in self.supervisors:
            supervisor.leave = False

    async def whole(self, seconds: float) -> float:
        """Wait until the target serves and its draft is connected; how long that took. Raises `TimeoutError`."""
        begun = time.monotonic()
        async with asyncio.timeout(seconds):
            while True:
                with contextlib.suppress(OutriderError, ServiceUnreachable):
                    async with self.client() as client:
                        if (await client.info(timeout=2.0)).draft_connected:
                            return time.monotonic() - begun
                await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def world_of(
    taught: Taught,
    folder: Path,
    drafter: str,
    placement: str = "shared",
    target_flags: Sequence[str] = (),
    draft_flags: Sequence[str] = (),
    token: str = "",
    *,
    spare: Callable[[str, str], bool] | None = None,
) -> AsyncIterator[World]:
    """Services that run until the block ends. `token` is what `World.client` shows. With `spare` there is another
    draft beside the one behind the proxy, whose address is one that this says yes to, given the proxy's and its own."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        target_proxy, draft_proxy = Proxy(str(folder / "target.sock")), Proxy(str(folder / "draft.sock"))
        for proxy in (target_proxy, draft_proxy):
            await proxy.start()
            stack.push_async_callback(proxy.stop)
        liar = LyingDraft(VOCABULARY, seed=1)
        await serve_lies(liar, folder / "liar.sock", stack)
        drafts, addresses = [_draft(drafter, taught, folder, "draft", draft_flags)], [draft_proxy.address]
        if spare is not None:
            names = (f"spare-{number}" for number in itertools.count())
            name = next(name for name in names if spare(draft_proxy.address, f"unix:{folder}/{name}.sock"))
            drafts.append(_draft(drafter, taught, folder, name, draft_flags))
            addresses.append(f"unix:{folder}/{name}.sock")
        flags = ["--listen", f"unix:{folder}/target.sock", "--drain-seconds", "0.2", "--log-level", "warning"]
        flags += ["--model", str(taught.model), "--dtype", "float32", "--draft", ",".join(addresses)]
        flags += ["--kv-tokens", "8192", "--row-budget", "all", "--engine-process", placement, "--threads", "1"]
        if drafter != "trie":
            flags += ["--draft-head", str(taught.head)]
        target = Child("target_service", [*flags, *target_flags], folder / "target.log")
        world = World(
            taught, folder, drafter, placement, target, drafts[0], target_proxy, draft_proxy, liar, token=token
        )
        world.supervisors = [Supervisor(target), *map(Supervisor, drafts)]
        for supervisor in world.supervisors:
            supervisor.child.start()
            stack.callback(supervisor.child.end)
            watching = asyncio.create_task(supervisor.watch())
            stack.callback(watching.cancel)
        await world.whole(_START_SECONDS)
        yield world


def _draft(drafter: str, taught: Taught, folder: Path, name: str, draft_flags: Sequence[str]) -> Child:
    """A draft service that listens at `name`.sock, not started."""
    flags = ["--listen", f"unix:{folder}/{name}.sock", "--drain-seconds", "0.2", "--log-level", "warning"]
    arguments = [*flags, *draft_arguments(drafter, taught, folder), *draft_flags]
    return Child("draft_service", arguments, folder / f"{name}.log")


def spread(coins: random.Random, least: float, most: float) -> float:
    """A number between the two whose logarithm is drawn evenly: short ones as often as long ones."""
    return float(least * (most / least) ** coins.random())


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
