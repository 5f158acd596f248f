"""A draft that means harm: what it sends costs its sequences their drafts, and the engine no more than some time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_draft import FAST, FakeDraft, linked, serving, until
from scripted_drafter import VOCABULARY, Listener, opening, step
from waits import HUNG_SECONDS

from benchmarks.shared.virtual_clock import VirtualClock
from outrider.drafting import inbox as inbox_module
from outrider.drafting.draft_tree import MEMORY_IDS, GrowingTree
from outrider.drafting.events import Connected, Disconnected, Grown
from outrider.drafting.inbox import LISTEN_SECONDS, DraftInbox, QueuedEvent
from outrider.drafting.stream import MAX_ANSWERS_KEPT, WORK_PER_ANSWER, DraftConversation
from outrider.errors import CreditExceeded, InvalidField
from outrider.v1 import draft_pb2
from outrider.wire.frames import MAX_NODES as NODES
from outrider.wire.frames import MAX_SEQUENCES_PER_FRAME, DraftInfo, SequenceGrowth, TreeLimits
from target_service.config import TargetConfig
from target_service.speculation.drafts import DraftTrees


class Noting(DraftInbox):
    """Notes the events that it handles."""

    def __init__(self) -> None:
        super().__init__()
        self.handled: list[QueuedEvent] = []

    def _handle(self, event: QueuedEvent) -> None:
        self.handled.append(event)

    def _cut_off(self, reason: str) -> None:
        raise AssertionError(reason)


def test_every_look_at_what_came_handles_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine takes the processor away for longer than a look may take."""
    inbox, clock = Noting(), itertools.count()
    for reason in "abc":
        inbox.receive(Disconnected(reason))
    monkeypatch.setattr(inbox_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    for looks in (1, 2, 3):
        inbox.listen()
        assert len(inbox.handled) == looks


def one_child(wire_id: int, first: int) -> draft_pb2.SequenceGrowth:
    """As many names for the same child of the root as a growth may hold."""
    return draft_pb2.SequenceGrowth(
        sequence_id=wire_id,
        first_node_id=first,
        parent_ids=[0] * NODES,
        token_ids=[7] * NODES,
        scores=[0.5] * NODES,
    )


def frame_of(*parts: draft_pb2.SequenceGrowth) -> draft_pb2.ProposeResponse:
    return draft_pb2.ProposeResponse(growth=draft_pb2.GrowSequences(sequences=parts))


def test_a_frame_of_very_many_growths_is_not_looked_at() -> None:
    heard = Listener()
    conversation = DraftConversation(heard, VOCABULARY)
    conversation.open(opening(7))
    with pytest.raises(CreditExceeded, match=f"more than {MAX_SEQUENCES_PER_FRAME} growths"):
        conversation.receive(frame_of(*(one_child(1, 1 + NODES * i) for i in range(1000))))
    assert heard.growths == []


def test_nodes_are_bounded_by_what_was_asked() -> None:
    """In legal frames, for which there is credit."""
    heard = Listener()
    conversation = DraftConversation(heard, VOCABULARY)
    conversation.open(opening(7))
    allowed = WORK_PER_ANSWER // (1 + NODES)
    for number in range(allowed):
        conversation.receive(frame_of(one_child(1, 1 + NODES * number)))
    with pytest.raises(CreditExceeded, match="more nodes than was requested"):
        conversation.receive(frame_of(one_child(1, 1 + NODES * allowed)))
    assert len(heard.growths) == allowed


def test_what_a_draft_does_not_send_it_cannot_save_up() -> None:
    heard = Listener()
    conversation = DraftConversation(heard, VOCABULARY)
    conversation.open(opening(7))
    for number in range(1, 10 * MAX_ANSWERS_KEPT):
        conversation.advance([step(number, 20, sequence_id=7)])
    nodes = MAX_ANSWERS_KEPT * WORK_PER_ANSWER
    with pytest.raises(CreditExceeded):
        for first in range(1, 2 * nodes, 16 * NODES):
            conversation.receive(frame_of(*(one_child(1, first + NODES * i) for i in range(16))))
    assert NODES * len(heard.growths) <= nodes


def test_a_tree_does_not_remember_names_without_end() -> None:
    tree = GrowingTree([9], step=0)
    with pytest.raises(InvalidField, match="used at one step"):
        for number in range(1000):
            first = 1 + NODES * number
            tree.hold(SequenceGrowth(1, 0, first, (0,) * NODES, (7,) * NODES, (0.5,) * NODES))
            tree.settle()
    assert number <= MEMORY_IDS // NODES + 1


class QuietFeatures:
    """No draft here reads hidden states."""

    taken = False

    def connect(self, _request: object) -> None: ...

    def disconnect(self) -> None: ...


class CutLink:
    """Remembers why it was cut off."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def cut_off(self, reason: str) -> None:
        self.reasons.append(reason)

    def close(self, _sequence_ids: list[int]) -> None: ...


class SlowDrafting(DraftTrees):
    """Takes its time over every growth, as it does over large ones on a slow machine."""

    seconds = 0.002

    def _graft(self, _growth: SequenceGrowth) -> None:
        time.sleep(self.seconds)


def drafting_of(kind: type[DraftTrees], wait_seconds: float = 0.1) -> tuple[DraftTrees, CutLink]:
    config = TargetConfig(draft="hostile", draft_wait_ms=wait_seconds * 1e3)
    drafting, link = kind(config, VOCABULARY, QuietFeatures()), CutLink()  # type: ignore[arg-type]
    drafting.attach(link)  # type: ignore[arg-type]
    drafting.receive(Connected(DraftInfo("hostile", 0, "", TreeLimits(), 1024, "0")))
    drafting.listen()
    return drafting, link


SENT = SequenceGrowth(1, 0, 1, (0,), (7,), (0.5,))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock().install(monkeypatch)
    clock.deliver_while_waiting(monkeypatch)
    return clock


def test_the_engine_listens_for_a_share_of_a_step(clock: VirtualClock) -> None:
    drafting, link = drafting_of(SlowDrafting)
    drafting.receive(Grown([SENT] * 10_000))
    begun = clock.now
    drafting.listen()
    # 10,000 take 20 s.
    assert LISTEN_SECONDS < clock.now - begun <= LISTEN_SECONDS + 2 * SlowDrafting.seconds
    assert link.reasons == [] and drafting.connected


def test_a_draft_that_says_more_than_can_be_taken_in_is_cut_off(
    caplog: pytest.LogCaptureFixture, clock: VirtualClock
) -> None:
    drafting, link = drafting_of(SlowDrafting)
    drafting.receive(Grown([SENT] * 100_000))
    begun = clock.now
    while not link.reasons:
        drafting.listen()
    assert 1.0 <= clock.now - begun < 2.0
    assert "more than there is time to read" in link.reasons[0] and "cut off" in caplog.text
    # What it had said is forgotten; that it is gone is still heard of.
    drafting.receive(Disconnected("cut off"))
    drafting.listen()
    assert not drafting.connected and drafting.lost == "cut off" and len(link.reasons) == 1


@pytest.mark.usefixtures("clock")
def test_one_long_step_is_not_held_against_the_draft() -> None:
    drafting, link = drafting_of(SlowDrafting)
    drafting.receive(Grown([SENT] * 50))
    drafting.listen()
    time.sleep(1.1)
    for _ in range(20):
        drafting.listen()
    assert link.reasons == []


class EndlessDrafting(DraftTrees):
    """Hears something new whenever it has heard something."""

    def _graft(self, growth: SequenceGrowth) -> None:
        time.sleep(0.0005)
        self.receive(Grown([growth]))


def test_waiting_ends_though_the_draft_goes_on_about_something_else(clock: VirtualClock) -> None:
    drafting, _ = drafting_of(EndlessDrafting)
    drafting._trees[7] = GrowingTree([9], 0)
    drafting.receive(Grown([SENT]))
    begun = clock.now
    waited = drafting.wait_for([SimpleNamespace(sequence_id=7)])  # type: ignore[list-item]
    # A tenth of a second, the look before it, and the one that was under way at its end.
    assert 0.1 <= waited * 1e-9 < clock.now - begun < 0.1 + 3 * LISTEN_SECONDS


def test_the_log_gets_one_line_about_many_malformed_growths(caplog: pytest.LogCaptureFixture) -> None:
    drafting, _ = drafting_of(DraftTrees)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 6):
            drafting._trees[number] = GrowingTree([9], 0)
            drafting._graft(replace(SENT, sequence_id=number, base_step=5))
    assert not drafting._trees
    assert [record.getMessage() for record in caplog.records] == [
        "a malformed growth ends drafting for its sequence: growth.base_step: lies ahead of the sequence"
        " (and 0 like it)"
    ]


async def flood(frame: draft_pb2.ProposeRequest, context: Any) -> None:
    if frame.HasField("open"):
        for number in range(20):
            await context.write(frame_of(one_child(frame.open.sequence_id, 1 + NODES * number)))


async def test_a_hostile_draft_is_cut_off_and_met_less_and_less_often() -> None:
    fake, met_at = FakeDraft(), list[float]()

    async def noted(frame: draft_pb2.ProposeRequest, context: Any) -> None:
        if frame.HasField("open") and len(met_at) < len(fake.streams):
            met_at.append(time.monotonic())
        await flood(frame, context)

    fake.behave = noted
    options = replace(FAST, fault_backoff=0.2, max_fault_backoff=60.0)
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        async with asyncio.timeout(HUNG_SECONDS):
            while len(met_at) < 4:
                link.open(opening(1))
                await asyncio.sleep(0.01)
        await until(heard, lambda it: any("more nodes than was requested" in loss for loss in it.losses))
        # Half of 0.2, 0.4 and 0.8 s apart at the least, where it used to be met again within 10 ms.
        for pause, (before, after) in zip((0.1, 0.2, 0.4), itertools.pairwise(met_at), strict=True):
            assert after - before > pause


async def test_a_link_that_is_cut_off_says_so_and_meets_the_draft_again() -> None:
    fake = FakeDraft()

    async def stop_reading(frame: draft_pb2.ProposeRequest, context: Any) -> object:
        await fake.answer(frame, context)
        await asyncio.sleep(0.05)
        return None

    fake.behave = stop_reading
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.cut_off("it is too much")
        await until(heard, lambda it: "it is too much" in it.losses and len(it.infos) == 2)
        link.open(opening(1))
        await until(heard, lambda it: it.answered(1, 0))


def test_growths_of_one_node_that_exists_do_not_pile_up_in_the_device_tables() -> None:
    from target_service.execution.node_tables import NodeTables
    from tree_kernels.node_table import Mailboxes

    tables = NodeTables(2, Mailboxes(2, torch.device("cpu")))
    tables.assign_slot(1)
    for number in range(5000):
        tables.grow(SequenceGrowth(1, 0, 1 + number, (0,), (7,), (0.5,)), 1, [9])
    assert len(tables._trees[1].growths) <= 64 and tables.of_draft(1)
