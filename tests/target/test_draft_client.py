"""The link against a scripted draft service: it connects, checks who is there, asks in order, and stops."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_harness import draft_over
from fake_draft import FAST, INFO, NEVER_AGAIN, FakeDraft, eventually, linked, serving, until
from scripted_drafter import VOCABULARY, Listener, opening, step
from waits import HUNG_SECONDS

from benchmarks.drafters.random_trees import RANDOM
from draft_service.drafters.base import create
from outrider.busy_polling import BusyPolling
from outrider.drafting.link import ChannelTls, connect_draft
from outrider.drafting.stream import CREDIT_WINDOW
from outrider.serving import GrpcServer, ServingOptions


@pytest.fixture
def fake() -> FakeDraft:
    return FakeDraft()


async def test_what_is_asked_is_answered(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        assert heard.infos == [INFO]
        link.open(opening(42, step=3))
        await until(heard, lambda it: it.answered(42, 3))
        link.advance([step(4, 20, sequence_id=42)])
        await until(heard, lambda it: it.answered(42, 4))
        assert heard.failures == heard.losses == []


async def test_a_service_of_another_kind_is_told() -> None:
    server = GrpcServer(ServingOptions(listen="127.0.0.1:0"), [])
    await server.start()
    async with linked(server.address) as (_, heard):
        await until(heard, lambda it: it.losses)
        assert heard.losses[0].startswith(f"what answers at {server.address} is no draft service (UNIMPLEMENTED: ")
    await server.stop(0)


async def test_one_call_is_one_frame_in_order(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        await eventually(lambda: fake.streams)
        for sequence_id in (1, 2, 3):
            link.open(opening(sequence_id))
        for number in range(1, 30):
            link.advance([step(number, 20, sequence_id=sequence_id) for sequence_id in (1, 2, 3)])
        link.close([1, 2])
        await eventually(lambda: any(frame.HasField("close") for frame in fake.streams[0]))
        kinds = [frame.WhichOneof("frame") for frame in fake.streams[0]]
        assert [kind for kind in kinds if kind != "credit"] == ["open"] * 3 + ["advance"] * 29 + ["close"]
        advances = [frame.advance.sequences for frame in fake.streams[0] if frame.HasField("advance")]
        assert all([part.step for part in parts] == [i + 1] * 3 for i, parts in enumerate(advances))


async def test_a_long_conversation_never_runs_out_of_credit(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        for number in range(1, 5 * CREDIT_WINDOW):
            link.advance([step(number, 20)])
            await until(heard, lambda it, number=number: it.answered(1, number))
        assert heard.losses == []


@pytest.mark.parametrize(("vocabulary_size", "fingerprint"), [(0, ""), (VOCABULARY, "")], ids=["any", "size only"])
async def test_a_draft_that_takes_any_model_is_used(fake: FakeDraft, vocabulary_size: int, fingerprint: str) -> None:
    fake.info = replace(INFO, vocabulary_size=vocabulary_size, tokenizer_fingerprint=fingerprint)
    async with serving(fake) as server, linked(server.address, fingerprint="ab" * 32) as (_, heard):
        await until(heard, lambda it: it.infos)


async def test_after_stop_nothing_is_delivered_and_nothing_raises(fake: FakeDraft) -> None:
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: it.growths)
        await asyncio.to_thread(link.stop)
        delivered = len(heard.growths)
        link.open(opening(2))
        link.advance([step(1, 2)])
        link.close([1])
        link.stop()
        await asyncio.sleep(0.05)
        assert len(heard.growths) == delivered and heard.losses == []


async def test_stopping_does_not_wait_for_a_draft_that_is_not_there() -> None:
    async with linked("127.0.0.1:1", NEVER_AGAIN) as (link, heard):
        await until(heard, lambda it: it.losses)
        await asyncio.wait_for(asyncio.to_thread(link.stop), HUNG_SECONDS)


async def test_an_error_of_grpcs_own_is_said_and_does_not_end_the_link(fake: FakeDraft) -> None:
    """As about metadata that it cannot carry."""
    options = replace(FAST, metadata=(("authorization", "Bearer one\ntwo"),))
    async with serving(fake) as server, linked(server.address, options) as (link, heard):
        await until(heard, lambda it: it.losses)
        assert link._thread.is_alive()
        assert fake.streams == []
        link._options = FAST
        await until(heard, lambda it: it.infos)


async def test_tokens_travel_with_every_call(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("t" * 20 + " target\n")
    options = replace(FAST, metadata=(("authorization", "Bearer " + "t" * 20),))
    async with draft_over(auth_tokens=str(path)) as draft:
        async with linked(draft.server.address) as (_, refused):
            await until(refused, lambda it: it.losses)
            assert "UNAUTHENTICATED" in refused.losses[0]
        async with linked(draft.server.address, options) as (link, heard):
            await until(heard, lambda it: it.infos)
            link.open(opening(1, tenant="acme"))
            await until(heard, lambda it: it.answered(1, 0))


async def test_mutual_tls(certificates: Any) -> None:
    tls = ChannelTls.of_files(*map(str, (certificates.authority, certificates.client_key, certificates.client)))
    settings = {
        "tls_certificate": str(certificates.server),
        "tls_key": str(certificates.server_key),
        "tls_client_ca": str(certificates.authority),
    }
    async with draft_over(**settings) as draft:
        async with linked(draft.server.address) as (_, refused):
            await until(refused, lambda it: it.losses)
            assert refused.losses[0].startswith("UNAVAILABLE: it hung up at once (")
            assert refused.losses[0].endswith("as a server does that speaks TLS")
        async with linked(draft.server.address, replace(FAST, tls=tls)) as (link, heard):
            await until(heard, lambda it: it.infos)
            link.open(opening(1))
            await until(heard, lambda it: it.answered(1, 0))


async def test_tls_to_a_draft_without_it(certificates: Any) -> None:
    tls = ChannelTls.of_files(str(certificates.authority))
    async with (
        draft_over() as draft,
        linked(draft.server.address, replace(FAST, tls=tls)) as (_, heard),
    ):
        await until(heard, lambda it: it.losses)
        assert heard.losses[0] == "UNAVAILABLE: the server does not speak TLS"


def test_a_drafter_in_process_is_found_by_the_scheme_of_the_address() -> None:
    heard = Listener()
    link = connect_draft(f"inprocess:{RANDOM}", heard, VOCABULARY, "")
    link.open(opening(3))
    assert heard.infos[0].drafter == "random" and heard.answered(3, 0)
    link.stop()
    with pytest.raises(ValueError, match="nothing"):
        connect_draft("inprocess:nothing", heard, VOCABULARY, "")
    assert create(RANDOM).name == "random"


async def test_a_link_polls_after_each_frame_where_it_may(fake: FakeDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    monkeypatch.setattr(BusyPolling, "start", lambda self: started.append(self.seconds))
    async with serving(fake) as server, linked(server.address) as (link, heard):
        await until(heard, lambda it: it.infos)
        link.open(opening(1))
        await until(heard, lambda it: it.growths)
        # A link shares its interpreter with an engine, and sleeps between frames by default.
        assert set(started) == {0.0}
        started.clear()
        link.busy_poll(0.02)
        link.advance([step(1, 20)])
        await until(heard, lambda it: it.answered(1, 1))
        assert set(started) == {0.02}
