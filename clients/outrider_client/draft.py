"""The client of a draft service: its drafter, its health, and the documents that it drafts from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from outrider.v1 import draft_pb2, draft_pb2_grpc
from outrider.wire.drafts import corpus_from_pb, info_from_pb
from outrider.wire.frames import CorpusInfo, DraftInfo
from outrider_client.connection import AsyncClosing, Connection, Tls
from outrider_client.policy import SINGLE_ATTEMPT, Policy

DRAFT_SERVICE = "outrider.v1.DraftService"
# As many as one message may carry.
MAX_PIECE = 65536


@dataclass(frozen=True, slots=True)
class CorpusAdded:
    """What was added: `tokens` of this call; `nodes` is the size of the whole trie."""

    tokens: int
    nodes: int


class DraftClient(AsyncClosing):
    """Talks to one draft service.

    Example:
        async with DraftClient.connect("127.0.0.1:50052") as draft:
            await draft.add_corpus([[1, 5, 9, 4]], tenant="docs")
    """

    def __init__(self, connection: Connection, policy: Policy = SINGLE_ATTEMPT) -> None:
        """On a connection made elsewhere. Without a policy, retries and deadlines of long calls are the caller's."""
        self._policy = policy
        self._connection = connection
        # The generated stubs give one class two types; on an aio channel it is this one.
        self._stub = cast("draft_pb2_grpc.DraftServiceAsyncStub", draft_pb2_grpc.DraftServiceStub(connection.channel))

    @classmethod
    def connect(
        cls, address: str, *, tls: Tls | None = None, token: str = "", tenant: str = "", policy: Policy | None = None
    ) -> DraftClient:
        """A client of the draft at `address` (HOST:PORT or unix:PATH)."""
        return cls(Connection(address, tls=tls, token=token, tenant=tenant), policy or Policy())

    async def close(self) -> None:
        """Cancel what runs and close the connection."""
        await self._connection.close()

    async def info(self, timeout: float | None = None) -> DraftInfo:
        """What the service drafts with. Without a timeout the policy's deadline holds."""
        ask = partial(self._connection.call, self._stub.GetDraftInfo, draft_pb2.GetDraftInfoRequest())
        return info_from_pb(await self._policy.call(timeout, ask))

    async def add_corpus(
        self, documents: Iterable[Sequence[int]], *, tenant: str = "", corpus: str = "", timeout: float | None = None
    ) -> CorpusAdded:
        """Add documents (token ids) to a tenant's trie, or to the shared corpus `corpus`.

        Raises `NotSupported` where the drafter has no trie, `QuotaExceeded` past the tenant's quota, `ValueError` for a
        token id that is no unsigned 32-bit number, and whatever `documents` raises.
        """
        pieces = _pieces(documents, tenant, corpus)
        response = await self._connection.call_with_all(self._stub.AddCorpus, pieces, timeout)
        return CorpusAdded(response.tokens, response.nodes)

    async def list_corpora(self, *, tenant: str = "", timeout: float | None = None) -> list[CorpusInfo]:
        """What a tenant may draft from: its own trie, if it has one, and every shared corpus. Without a
        timeout the policy's deadline holds.

        Raises `NotSupported` where the drafter has no trie.
        """
        ask = partial(self._connection.call, self._stub.ListCorpora, draft_pb2.ListCorporaRequest(tenant=tenant))
        return [corpus_from_pb(pb) for pb in (await self._policy.call(timeout, ask)).corpora]

    async def delete_corpus(self, corpus: str, *, tenant: str = "", timeout: float | None = None) -> CorpusInfo:
        """Delete a shared corpus; returns its description. Never retried: after a lost answer it may be done.

        Raises `UnknownCorpus` for one that does not exist or belongs to another tenant, and `NotSupported` where the
        drafter has no trie.
        """
        request = draft_pb2.DeleteCorpusRequest(tenant=tenant, corpus=corpus)
        return corpus_from_pb((await self._connection.call(self._stub.DeleteCorpus, request, timeout)).corpus)

    async def serving(self, timeout: float = 5.0) -> bool:
        """Whether the draft answers that it is healthy."""
        return await self._connection.serving(DRAFT_SERVICE, timeout)


async def _pieces(
    documents: Iterable[Sequence[int]], tenant: str, corpus: str
) -> AsyncIterator[draft_pb2.AddCorpusRequest]:
    yield draft_pb2.AddCorpusRequest(tenant=tenant, corpus=corpus)
    for document in documents:
        for start in range(0, len(document), MAX_PIECE):
            yield draft_pb2.AddCorpusRequest(token_ids=document[start : start + MAX_PIECE])
