"""Who may teach and draft for whom, and what corpora cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from draft_harness import Draft, draft_over
from scripted_drafter import CORPUS_QUOTA, opening

from draft_service.drafters.base import create
from draft_service.server import MAX_CORPUS_TOKENS
from outrider.errors import (
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
        async with draft_over(create("random")) as draft:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.add(draft, draft_pb2.AddCorpusRequest(token_ids=[1]))
            assert isinstance(error_of_rpc(caught.value), NotSupported)


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
