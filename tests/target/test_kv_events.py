"""KV events: what a router builds from them is what the cache holds, and who may read them, from when on."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from scripted_service import Target, target_over
from waits import HUNG_SECONDS

from outrider.errors import NotSupported, OutriderError, PermissionDenied, PositionOutOfRange
from outrider.serving import Authenticator, Caller
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc
from target_service.api import kv_events
from target_service.api.kv_events import KvEventLog, PagesFollower
from tree_kernels.pages import Pages
from tree_kernels.prefix_tree import PageChange, PrefixNode, PrefixTree

SIZE = 2
OPERATOR, TENANT = "operator-0123456789", "tenant-0123456789"
TOKENS = {OPERATOR: Caller("ops", operator=True), TENANT: Caller("acme")}


class Router:
    """Knows the blocks of a target by its events alone: the whole text of each, by its hash."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[str, tuple[int, ...]]] = {}

    def read(self, events: Any) -> None:
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "cleared":
                self.texts.clear()
            elif kind == "removed":
                for block in event.removed.block_hashes:
                    del self.texts[block]
            else:
                self._store(event.stored)

    def _store(self, stored: Any) -> None:
        size = stored.block_size
        assert len(stored.token_ids) == size * len(stored.block_hashes)
        before = self.texts[stored.parent_block_hash][1] if stored.HasField("parent_block_hash") else ()
        for place, block in enumerate(stored.block_hashes):
            assert block not in self.texts, "a hash is one text's, of one tenant"
            before += tuple(stored.token_ids[place * size : (place + 1) * size])
            self.texts[block] = stored.tenant, before


def insert(pages: Pages, tree: PrefixTree, tenant: str, tokens: list[int]) -> None:
    """What a sequence does that reads these tokens and ends. Raises `OutOfPages`."""
    nodes = tree.match(tenant, tokens, len(tokens))
    node: PrefixNode | None = nodes[-1] if nodes else None
    held = [node.page for node in nodes]
    pages.share(held)
    try:
        held += pages.allocate(len(tokens) // SIZE - len(held))
        for place in range(len(nodes), len(tokens) // SIZE):
            node = tree.insert(tenant, node, tokens[place * SIZE : (place + 1) * SIZE], held[place])
        if node is not None:
            tree.use(node)
    finally:
        pages.release(held)


def texts_of(tree: PrefixTree) -> list[tuple[str, tuple[int, ...]]]:
    return sorted(
        (node.key[0] or "", tuple(token for above in node.path() for token in array("i", above.key[1])))
        for node in tree._by_use
    )


async def test_a_router_knows_what_the_tree_holds() -> None:
    """Under any order of texts of two tenants, public ones, evictions and clearing."""
    chance, pages = random.Random(5), Pages(12, SIZE)
    tree, router = PrefixTree(pages, records=True), Router()
    tree.publish([1, 1, 0, 0])
    log = KvEventLog(4, SIZE)
    evicted = 0
    for _ in range(400):
        if chance.random() < 0.02:
            tree.clear()
        else:
            before = len(tree)
            insert(
                pages, tree, chance.choice("ab"), [chance.randrange(2) for _ in range(SIZE * chance.randrange(1, 7))]
            )
            evicted += len(tree) < before
        if changes := tree.pop_changes():
            log.append(changes)
            router.read(log._batches[-1].events)
        assert sorted(router.texts.values()) == texts_of(tree)
    assert evicted or len(tree) > 6
    assert {tenant for tenant, _ in router.texts.values()} <= {"", "a", "b"}


async def test_a_router_that_comes_late_knows_what_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first start, after batches that are not kept any more, and after those of an earlier server; and whoever
    still finds its batch gets no snapshot."""
    monkeypatch.setattr(kv_events, "_SNAPSHOT_PAGES", 5)
    chance, pages = random.Random(7), Pages(64, SIZE)
    tree, log = PrefixTree(pages, records=True), KvEventLog(3, SIZE)
    for _ in range(30):
        insert(pages, tree, chance.choice("ab"), [chance.randrange(3) for _ in range(SIZE * chance.randrange(1, 7))])
        if changes := tree.pop_changes():
            log.append(changes)
    last = log._last
    for first in (0, 1, last + 9):
        router, following = Router(), log.follow(first, snapshot=True)
        router.texts[1] = "a", (9, 9)
        while sorted(router.texts.values()) != texts_of(tree):
            batch = await anext(following)
            assert batch.sequence == last
            router.read(batch.events)
        insert(pages, tree, "c", [first] * SIZE)
        log.append(tree.pop_changes())
        last += 1
        batch = await anext(following)
        assert batch.sequence == last
        router.read(batch.events)
        assert sorted(router.texts.values()) == texts_of(tree)
    following = log.follow(last, snapshot=True)
    assert [(await anext(following)).sequence for _ in range(2)] == [last - 1, last]


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    pages = Pages(8, SIZE)
    tree = PrefixTree(pages)
    insert(pages, tree, "a", [1, 2, 3, 4])
    assert tree.pop_changes() == []


def stored(number: int, parent: int = 0, tenant: str = "acme") -> PageChange:
    return PageChange(number, True, parent, tenant, array("i", [number] * 16).tobytes())


@asynccontextmanager
async def serving(kept: int = 3, tokens: dict[str, Caller] | None = None) -> AsyncIterator[tuple[Target, KvEventLog]]:
    log = KvEventLog(kept, 16)
    options = {"authenticator": Authenticator(tokens)} if tokens else {}
    async with target_over(kv_events=log, **options) as target:
        yield target, log


def subscribed(target: Target, first: int = 0, token: str = "") -> Any:
    caller = {"metadata": (("authorization", f"Bearer {token}"),)} if token else {}
    request = pb.SubscribeKvEventsRequest(from_sequence=first)
    return target.stub.SubscribeKvEvents(request, timeout=HUNG_SECONDS, **caller)


async def refusal(call: Any) -> OutriderError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_of_rpc(caught.value)


async def test_batches_come_in_order_and_are_replayed() -> None:
    async with serving() as (target, log):
        live = subscribed(target)
        assert (await live.read()).sequence == 0
        for number in range(1, 6):
            log.append([stored(number), stored(10 + number, parent=number), PageChange(number + 10)])
            batch = await live.read()
            assert batch.sequence == number and batch.timestamp_ns
            first, second = batch.events
            assert list(first.stored.block_hashes) == [number, 10 + number]
            assert not first.stored.HasField("parent_block_hash") and first.stored.tenant == "acme"
            assert list(first.stored.token_ids) == [number] * 16 + [10 + number] * 16
            assert first.stored.block_size == 16 and list(second.removed.block_hashes) == [number + 10]
        live.cancel()
        replayed = subscribed(target, first=3)
        assert [(await replayed.read()).sequence for _ in range(4)] == [2, 3, 4, 5]
        log.append([PageChange(0)])
        batch = await replayed.read()
        assert batch.sequence == 6 and batch.events[0].WhichOneof("event") == "cleared"
        replayed.cancel()


async def test_batches_that_are_not_kept_are_refused() -> None:
    async with serving() as (target, log):
        for number in range(1, 6):
            log.append([stored(number)])
        old = await refusal(subscribed(target, first=2))
        assert isinstance(old, PositionOutOfRange) and old.metadata == {"oldest": "3"}
        ahead = await refusal(subscribed(target, first=7))
        assert isinstance(ahead, PositionOutOfRange) and ahead.metadata == {"next": "6"}


async def test_a_reader_that_is_too_slow_is_told_so() -> None:
    log = KvEventLog(2, 16)
    batches = log.follow(0)
    assert (await anext(batches)).sequence == 0
    for number in range(1, 5):
        log.append([stored(number)])
    with pytest.raises(PositionOutOfRange, match="not kept"):
        await anext(batches)


async def test_only_operators_read_what_all_tenants_said() -> None:
    async with serving(tokens=TOKENS) as (target, log):
        assert isinstance(await refusal(subscribed(target, token=TENANT)), PermissionDenied)
        call = subscribed(target, token=OPERATOR)
        await call.read()
        log.append([stored(1)])
        assert (await call.read()).sequence == 1
        call.cancel()


async def test_a_server_without_events_says_so() -> None:
    async with target_over() as target:
        assert isinstance(await refusal(subscribed(target)), NotSupported)


async def test_changes_cross_from_the_engines_thread() -> None:
    log = KvEventLog(2, 16)
    follower = PagesFollower(log, None)
    batches = log.follow(1)
    await anext(batches)
    await asyncio.to_thread(follower.on_pages, [stored(4)])
    async with asyncio.timeout(HUNG_SECONDS):
        assert (await anext(batches)).events[0].stored.block_hashes == [4]
    follower.on_speculation(True)
