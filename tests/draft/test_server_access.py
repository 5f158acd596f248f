"""Who may teach and draft for whom, and what corpora cost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from draft_harness import Draft, draft_over
from scripted_drafter import CORPUS_QUOTA, opening
from waits import ever_longer

from benchmarks.drafters.random_trees import RANDOM
from draft_service.drafters.base import create
from draft_service.server import MAX_CORPUS_TOKENS, SERVICE_NAME
from outrider.errors import (
    DeadlineExceeded,
    InvalidField,
    NotSupported,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)
from outrider.v1 import draft_pb2
from outrider.wire.trees import error_of_rpc


@pytest.fixture
async def draft() -> AsyncIterator[Draft]:
    async with draft_over() as running:
        yield running


class TestCorpora:
    async def add(self, draft: Draft, *requests: draft_pb2.AddCorpusRequest, **options: Any) -> Any:
        return await draft.stub.AddCorpus(iter(requests), **options)

    async def test_pieces_are_learnt_under_the_first_ones_name(self, draft: Draft) -> None:
        answer = await self.add(
            draft,
            draft_pb2.AddCorpusRequest(tenant="acme", corpus="docs", token_ids=[1, 2, 3]),
            draft_pb2.AddCorpusRequest(tenant="other", token_ids=[4]),
        )
        assert (answer.tokens, answer.nodes) == (4, 4)
        assert draft.drafter.learnt == {("acme", "docs"): [1, 2, 3, 4]}

    async def test_what_fits_is_kept_when_the_quota_is_used_up(self, draft: Draft) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.add(draft, draft_pb2.AddCorpusRequest(token_ids=range(CORPUS_QUOTA + 5)))
        assert isinstance(error_of_rpc(caught.value), QuotaExceeded)
        assert len(draft.drafter.learnt["default", ""]) == CORPUS_QUOTA

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"token_ids": [2**32 - 1]}, "token_ids[0]"),
            ({"token_ids": [0] * (MAX_CORPUS_TOKENS + 1)}, "token_ids"),
            ({"tenant": "a/b"}, "tenant"),
            ({"corpus": ".." * 40}, "corpus"),
        ],
        ids=["-1", "oversize", "tenant", "corpus"],
    )
    async def test_bad_pieces_are_refused(self, draft: Draft, fields: dict[str, Any], field: str) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.add(draft, draft_pb2.AddCorpusRequest(**fields))
        error = error_of_rpc(caught.value)
        assert isinstance(error, InvalidField) and error.field == field
        assert draft.drafter.learnt == {}

    async def test_nothing_at_all_is_learnt_from_nothing(self, draft: Draft) -> None:
        answer = await self.add(draft)
        assert (answer.tokens, answer.nodes) == (0, 0)

    async def test_a_drafter_without_a_trie_says_so(self) -> None:
        async with draft_over(create(RANDOM)) as draft:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.add(draft, draft_pb2.AddCorpusRequest(token_ids=[1]))
            assert isinstance(error_of_rpc(caught.value), NotSupported)
            for ask in (
                draft.stub.ListCorpora(draft_pb2.ListCorporaRequest()),
                draft.stub.DeleteCorpus(draft_pb2.DeleteCorpusRequest(corpus="docs")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask
                assert isinstance(error_of_rpc(caught.value), NotSupported)


class TestFirstMessages:
    async def test_a_silent_stream_is_ended(self) -> None:
        async with draft_over(first_message_seconds=1.0) as draft:
            for call in (draft.stub.Propose(), draft.channel.stream_stream(f"/{SERVICE_NAME}/AddCorpus")()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert isinstance(error_of_rpc(caught.value), DeadlineExceeded)

    async def test_a_stream_that_has_begun_may_be_silent(self) -> None:
        for seconds in ever_longer():
            # Where its first frame came too late for the limit.
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with draft_over(first_message_seconds=seconds) as draft, draft.stream() as stream:
                    await asyncio.sleep(1.5 * seconds)
                    await stream.open(opening())
                    await stream.opened()
                return
        pytest.fail("no limit was long enough")


class TestTokens:
    TOKENS = "a" * 20 + " acme\n" + "t" * 20 + " target\n"

    def bearer(self, letter: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {letter * 20}"),)

    @pytest.fixture
    async def locked(self, tmp_path: Path) -> AsyncIterator[Draft]:
        path = tmp_path / "tokens"
        path.write_text(self.TOKENS)
        async with draft_over(auth_tokens=str(path)) as running:
            yield running

    async def test_strangers_stay_outside(self, locked: Draft) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await locked.stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), metadata=self.bearer("x"))
        assert isinstance(error_of_rpc(caught.value), Unauthenticated)

    async def test_the_target_acts_for_every_tenant_and_others_for_themselves(self, locked: Draft) -> None:
        async with locked.stream(metadata=self.bearer("t")) as target:
            await target.open(opening(1, tenant="acme"))
            await target.opened()
        async with locked.stream(metadata=self.bearer("a")) as acme:
            await acme.open(opening(1, tenant="other"))
            assert await acme.reason() == (1, "PERMISSION_DENIED")
            await acme.open(opening(1, tenant="acme"))
            await acme.opened()

    async def test_nobody_teaches_another_tenants_trie(self, locked: Draft) -> None:
        request = draft_pb2.AddCorpusRequest(tenant="other", token_ids=[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await locked.stub.AddCorpus(iter([request]), metadata=self.bearer("a"))
        assert isinstance(error_of_rpc(caught.value), PermissionDenied)
        own = draft_pb2.AddCorpusRequest(token_ids=[1])
        await locked.stub.AddCorpus(iter([own]), metadata=self.bearer("a"))
        assert locked.drafter.learnt == {("acme", ""): [1]}

    async def test_who_sees_which_corpora(self, real: Draft) -> None:
        assert await self.names(real, "a") == ["", "manual", "notes"]
        assert await self.names(real, "b") == ["manual", "notes"]
        assert await self.names(real, "t") == ["manual", "notes"]
        assert await self.names(real, "t", tenant="acme") == ["", "manual", "notes"]
        assert await self.refusal(real.stub.ListCorpora, "b", draft_pb2.ListCorporaRequest(tenant="acme")) == (
            "PERMISSION_DENIED"
        )

    async def test_what_is_said_of_a_corpus(self, real: Draft) -> None:
        listed = await real.stub.ListCorpora(draft_pb2.ListCorporaRequest(), metadata=self.bearer("b"))
        manual = listed.corpora[0]
        assert (manual.corpus, manual.tenant, manual.shared) == ("manual", "acme", True)
        assert (manual.tokens, manual.documents) == (5, 2) and manual.nodes > 5 and manual.bytes > manual.nodes

    async def test_who_may_delete_a_corpus(self, real: Draft) -> None:
        async def deleted(letter: str, corpus: str, tenant: str = "") -> Any:
            request = draft_pb2.DeleteCorpusRequest(corpus=corpus, tenant=tenant)
            return await real.stub.DeleteCorpus(request, metadata=self.bearer(letter))

        async def refusal(letter: str, corpus: str, tenant: str = "") -> tuple[str, str]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await deleted(letter, corpus, tenant)
            return error_of_rpc(caught.value).reason, str(caught.value.details())

        # What is another's and what is not there are told apart by nothing.
        assert await refusal("b", "manual") == await refusal("b", "absent")
        assert (await refusal("b", "manual"))[0] == (await refusal("t", "manual", "beta"))[0] == "UNKNOWN_CORPUS"
        assert (await refusal("b", "manual", "acme"))[0] == "PERMISSION_DENIED"
        assert (await refusal("a", ""))[0] == (await refusal("a", "a/b"))[0] == "INVALID_FIELD"
        assert await self.names(real, "a") == ["", "manual", "notes"]
        assert (await deleted("a", "manual")).corpus.tokens == 5
        assert (await deleted("t", "notes")).corpus.tenant == "beta"
        assert await self.names(real, "a") == [""]
        assert (await refusal("a", "manual"))[0] == "UNKNOWN_CORPUS"

    async def test_a_sequence_goes_on_without_a_deleted_corpus(self, real: Draft) -> None:
        async with real.stream(metadata=self.bearer("b")) as stream:
            await stream.open(opening(1, [9, 1, 2], tenant="beta", corpus="manual"))
            await stream.opened()
            assert 3 in (await stream.growth()).sequences[0].token_ids
            request = draft_pb2.DeleteCorpusRequest(corpus="manual")
            await real.stub.DeleteCorpus(request, metadata=self.bearer("a"))
            await stream.advance((1, 1, [3]))
            assert 4 not in (await stream.growth()).sequences[0].token_ids
            await stream.open(opening(2, [9, 1, 2], tenant="beta", corpus="manual"))
            assert await stream.reason() == (2, "UNKNOWN_CORPUS")

    @pytest.fixture
    async def real(self, tmp_path: Path) -> AsyncIterator[Draft]:
        """A trie: of acme, what it was taught itself and `manual`; of beta, `notes`."""
        path = tmp_path / "tokens"
        path.write_text(self.TOKENS + "b" * 20 + " beta\n")
        drafter = create("trie")
        # Where nothing is compiled yet, a stream would wait for it.
        drafter.start()
        async with draft_over(drafter, auth_tokens=str(path)) as running:
            for letter, corpus, pieces in (
                ("a", "", [[7, 8]]),
                ("a", "manual", [[1, 2, 3], [3, 4]]),
                ("b", "notes", [[5]]),
            ):
                requests = [draft_pb2.AddCorpusRequest(corpus=corpus, token_ids=piece) for piece in pieces]
                await running.stub.AddCorpus(iter(requests), metadata=self.bearer(letter))
            yield running
            running.drafter.stop()

    async def names(self, draft: Draft, letter: str, **fields: str) -> list[str]:
        listed = await draft.stub.ListCorpora(draft_pb2.ListCorporaRequest(**fields), metadata=self.bearer(letter))
        return [corpus.corpus for corpus in listed.corpora]

    async def refusal(self, method: Any, letter: str, request: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request, metadata=self.bearer(letter))
        return error_of_rpc(caught.value).reason
