"""The link in a process of its own against a scripted draft service: the same as the other, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from draft_harness import draft_over
from fake_draft import FAST, INFO, NEVER_AGAIN, FakeDraft, eventually, serving, until
from scripted_drafter import VOCABULARY, Listener, opening, step
from waits import HUNG_SECONDS

from outrider.drafting import link_process
from outrider.drafting.link import ChannelTls, GrpcDraftLink, LinkOptions
from outrider.drafting.link_messages import (
    Advance,
    Close,
    CutOff,
    FromLink,
    GrownArrays,
    GrowthArrays,
    Open,
    SendFeatures,
    ToLink,
    pack,
    unpack_from_link,
    unpack_to_link,
)
from outrider.drafting.link_process import LinkProcess
from outrider.processes.framing import LENGTH_BYTES, FrameCutter, framed, framed_parts, parts_of
from outrider.processes.python import module_command
from outrider.sampling import VerificationMode
from outrider.wire.frames import DraftDistribution, SequenceFeatures, SequenceGrowth, Vectors
from target_service.config import TargetConfig
from target_service.preflight import prepared_draft


@asynccontextmanager
async def apart(address: str, options: LinkOptions = FAST, **settings: Any) -> AsyncIterator[tuple[Any, Listener]]:
    listener = Listener()
    link = LinkProcess(address, listener, VOCABULARY, "", options, **settings)
    try:
        yield link, listener
    finally:
        await asyncio.to_thread(link.stop)


@pytest.fixture
def fake() -> FakeDraft:
    return FakeDraft()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_what_is_asked_is_answered_in_order(fake: FakeDraft) -> None:
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        assert heard.infos == [INFO]
        await eventually(lambda: fake.streams)
        for sequence_id in (1, 2, 3):
            link.open(opening(sequence_id))
        for number in range(1, 30):
            link.advance([step(number, 20, sequence_id=sequence_id) for sequence_id in (1, 2, 3)])
        await until(heard, lambda it: all(it.answered(sequence_id, 29) for sequence_id in (1, 2, 3)))
        link.close([1, 2])
        await eventually(lambda: any(frame.HasField("close") for frame in fake.streams[0]))
        kinds = [frame.WhichOneof("frame") for frame in fake.streams[0]]
        assert [kind for kind in kinds if kind != "credit"] == ["open"] * 3 + ["advance"] * 29 + ["close"]
        assert heard.failures == heard.losses == []


async def test_features_come_as_they_were_sent(fake: FakeDraft) -> None:
    vectors = Vectors("bfloat16", 4096, os.urandom(8 * 2 * 4096))
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        link.send_features([SequenceFeatures(1, 0, vectors)])
        link.advance([step(1, 20)._replace(features=vectors)])
        await until(heard, lambda it: it.answered(1, 1))
        (sent,) = (frame.features for frame in fake.streams[0] if frame.HasField("features"))
        (told,) = (frame.advance for frame in fake.streams[0] if frame.HasField("advance"))
        assert sent.sequences[0].features.data == told.sequences[0].features.data == vectors.data


async def test_tls_and_tokens_go_along(certificates: Any, tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("t" * 20 + " target\n")
    settings = {"tls_certificate": str(certificates.server), "tls_key": str(certificates.server_key)}
    settings |= {"tls_client_ca": str(certificates.authority), "auth_tokens": str(tokens)}
    tls = ChannelTls.of_files(*map(str, (certificates.authority, certificates.client_key, certificates.client)))
    options = replace(FAST, tls=tls, metadata=(("authorization", "Bearer " + "t" * 20),))
    async with draft_over(**settings) as draft, apart(draft.server.address, options) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1, tenant="acme"))
        await until(heard, lambda it: it.answered(1, 0))


async def test_a_draft_that_ends_is_said_to_be_gone_and_found_again(fake: FakeDraft) -> None:
    async def leave(frame: Any, context: Any) -> object:
        return "end" if frame.HasField("advance") and len(fake.streams) == 1 else await fake.answer(frame, context)

    fake.behave = leave
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        link.advance([step(1, 20)])
        await until(heard, lambda it: it.losses and len(it.infos) == 2)
        link.open(opening(1, step=1))
        await until(heard, lambda it: it.answered(1, 1))


async def test_after_stop_nothing_is_delivered_and_no_process_is_left(fake: FakeDraft) -> None:
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        pid = link.pid
        await asyncio.to_thread(link.stop)
        for call in (lambda: link.open(opening(2)), lambda: link.advance([step(1, 2)]), lambda: link.close([1])):
            call()
        link.stop()
        assert not alive(pid) and heard.losses == []


async def test_stopping_does_not_wait_for_a_draft_that_is_not_there() -> None:
    async with apart("127.0.0.1:1", NEVER_AGAIN) as (link, heard):
        await until(heard, lambda it: it.losses)
        await asyncio.wait_for(asyncio.to_thread(link.stop), HUNG_SECONDS)


async def test_a_process_that_is_killed_is_replaced(fake: FakeDraft) -> None:
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: it.answered(1, 0))
        first = link.pid
        os.kill(first, signal.SIGKILL)
        await until(heard, lambda it: it.losses == ["its link's process ended"] and len(it.infos) == 2)
        assert link.pid != first
        link.open(opening(1, step=7))
        await until(heard, lambda it: it.answered(1, 7))


async def test_a_process_that_is_stuck_costs_no_memory_and_is_replaced(
    fake: FakeDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_process, "SILENT_SECONDS", HUNG_SECONDS)
    options, vectors = replace(FAST, max_waiting_feature_bytes=1 << 20), Vectors("bfloat16", 4096, bytes(64 * 8192))
    # Which is itself what is stopped: in a worker of ours another may stand for one of the usual command.
    command = module_command("outrider.drafting.link_worker")
    async with serving(fake) as server, apart(server.address, options, command=command) as (link, heard):
        await until(heard, lambda it: it.infos)
        # For this process alone; it takes effect behind the next thing that comes from it.
        link_process._wait_at_most(link._worker.connection, 3.0)
        link.open(opening(1))
        await until(heard, lambda it: it.answered(1, 0))
        first = link.pid
        os.kill(first, signal.SIGSTOP)
        for number in range(1, 100):
            link.advance([step(number, 20)._replace(features=vectors)])
            link.send_features([SequenceFeatures(1, 0, vectors)])
        # Nobody waited, or the calls would not have returned. What waits is what may, with one more frame and the
        # others' few bytes.
        assert link._worker.outbox.waiting_bytes < 3 << 20
        await until(heard, lambda it: it.losses == ["its link's process is stuck"] and len(it.infos) == 2)
        assert not alive(first)


async def test_one_that_cannot_start_is_tried_again_and_ever_more_seldom() -> None:
    command = (sys.executable, "-c", "raise SystemExit(3)")
    async with apart("127.0.0.1:1", command=command) as (_, heard):
        await until(heard, lambda it: len(it.losses) == 2)
        assert set(heard.losses) == {"its link's process ended"} and not heard.infos


async def test_a_process_ends_with_whoever_it_works_for(fake: FakeDraft) -> None:
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        process = link._worker.process
        # As the kernel does for a service that is killed.
        link._stopping.set()
        link._worker.hang_up()
        assert await asyncio.to_thread(process.wait, HUNG_SECONDS) == 0


async def test_cut_off_parts_from_a_draft_for_a_while(fake: FakeDraft) -> None:
    async with serving(fake) as server, apart(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.cut_off("too much")
        await until(heard, lambda it: it.losses == ["too much"] and len(it.infos) == 2)


@pytest.mark.parametrize(
    ("device", "chosen", "expected"),
    [("cpu", "auto", GrpcDraftLink), ("cpu", "own", LinkProcess), ("cuda", "auto", LinkProcess),
     ("cuda", "shared", GrpcDraftLink)],
)  # fmt: skip
def test_a_gpu_target_has_one_unless_told_otherwise(device: str, chosen: str, expected: type) -> None:
    connect = prepared_draft(TargetConfig(draft="127.0.0.1:1", device=device, draft_link_process=chosen))
    assert connect is not None
    link = connect(Listener(), VOCABULARY, "")
    link.stop()
    assert type(link) is expected


def body_of(message: ToLink | FromLink) -> bytes:
    return b"".join(pack(message))[LENGTH_BYTES:]


def test_messages_come_as_they_were() -> None:
    distributions = {9: DraftDistribution((1, 2), (3, 4))}
    growth = SequenceGrowth(7, 3, 9, (0, 9), (5, 2**31 - 1), (0.25, 0.1), distributions, True, self_contained=True)
    came = unpack_from_link(body_of(GrownArrays([GrowthArrays.of(growth)])))
    assert isinstance(came, GrownArrays)
    (other,) = (packed.growth() for packed in came.growths)
    numbers = {name: tuple(getattr(other, name)) for name in ("parent_ids", "token_ids", "scores")}
    assert replace(other, **numbers) == growth and other.self_contained
    vectors = Vectors("bfloat16", 2, b"\x00\x01\x02\x03")
    scaled = Vectors("float8_e4m3", 2, bytes(range(6)), (0.5, 1.0, 2.0))
    advances = [step(2, 1, 2, 3)._replace(features=vectors), step(9, 4), step(3, 8)._replace(features=scaled)]
    sequence = opening(4, mode=VerificationMode.COUPLED)
    features = [SequenceFeatures(1, 0, vectors), SequenceFeatures(7, 5, scaled)]
    for message in (
        Advance(advances),
        Advance([]),
        SendFeatures(features),
        Open(sequence),
        Close([1, 2]),
        CutOff("why"),
    ):
        assert unpack_to_link(body_of(message)) == message


def test_hidden_states_are_not_copied_into_a_frame() -> None:
    vectors = [Vectors("bfloat16", 4096, os.urandom(8192)) for _ in range(3)]
    first, *others = pack(SendFeatures([SequenceFeatures(number, 0, one) for number, one in enumerate(vectors)]))
    assert len(first) < 200
    assert all(other is one.data for other, one in zip(others, vectors, strict=True))


def test_a_malformed_frame_is_refused() -> None:
    """Cut anywhere, with a part too many or too few, or with other numbers in its table: never anything but refused."""
    vectors = Vectors("bfloat16", 2, bytes(4))
    good = body_of(Advance([step(1, 5)._replace(features=vectors)]))
    for end in range(len(good)):
        with pytest.raises(msgspec.DecodeError):
            unpack_to_link(good[:end])
    table = int.from_bytes(good[:4], "big")
    assert table == 2
    for count in (0, 1, 3, 2**31, 2**32 - 1):
        with pytest.raises(msgspec.DecodeError):
            unpack_to_link(count.to_bytes(4, "big") + good[4:])
    with pytest.raises(msgspec.DecodeError, match="does not name"):
        unpack_to_link(_joined(msgspec.msgpack.encode(["CutOff", "why"]), [b"more"]))
    with pytest.raises(msgspec.DecodeError, match="lacks"):
        head = bytes(parts_of(good)[0])
        unpack_to_link(_joined(head, []))
    with pytest.raises(msgspec.DecodeError, match="does not name"):
        unpack_from_link(_joined(msgspec.msgpack.encode(["Alive"]), [b""]))


def _joined(first: bytes, others: list[bytes]) -> bytes:
    return b"".join(framed_parts(first, others))[LENGTH_BYTES:]


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
def test_frames_are_cut_wherever_a_read_ends(piece: int) -> None:
    bodies = [b"", b"a", bytes(range(200)), b"end"]
    stream, cutter = b"".join(map(framed, bodies)), FrameCutter()
    found = [bytes(body) for at in range(0, len(stream), piece) for body in cutter.feed(stream[at : at + piece])]
    assert found == bodies
