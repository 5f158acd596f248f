"""Whose tries there are: one per tenant, and shared corpora by name. Nothing crosses from one tenant to another.

A shared corpus is read only by sequences that name it, and only the tenant that made it may add to it or delete it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import CorpusGrowth
from draft_service.ngram.arrays import Rows, Tokens
from draft_service.ngram.config import NEVER_LOG2, TrieConfig
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from outrider.errors import PermissionDenied, QuotaExceeded, UnknownCorpus
from outrider.wire.frames import CorpusInfo

# Shared corpora never give way, so that together they take this share at most and the tenants' tries keep the rest.
_SHARED_SHARE = 0.5
# A name that is taken stays taken until its owner deletes it.
_MOST_CORPORA = 16
# Over all tenants, so that one message of 200 KB lists them. Chosen, not measured: 64 tenants with all they may have.
_MOST_SHARED = 1024
# Documents may take this share of a tenant's trie, so that what its sequences say keeps room.
_DOCUMENT_SHARE = 0.5


@dataclass(slots=True)
class SharedCorpus:
    """A trie that any tenant may name, the tenant that made it, and how many documents it was taught."""

    owner: str
    trie: NgramTrie
    documents: int = 0


@dataclass(frozen=True, slots=True)
class StoredTrie:
    """The used rows of one trie, [n, COLUMNS] int32, and how many documents it was taught; `corpus` is empty for a
    tenant's own."""

    tenant: str
    corpus: str
    rows: Rows
    documents: int = 0


class Corpora:
    """Finds, makes and bounds tries. Lessons come from one thread; look-ups from any."""

    def __init__(self, config: TrieConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        # Least recently used first.
        self._tenants: OrderedDict[str, NgramTrie] = OrderedDict()
        self._shared: dict[str, SharedCorpus] = {}
        # Nodes that each tenant's documents made in its own trie, and how many documents those were.
        self._document_nodes: dict[str, int] = {}
        self._documents: dict[str, int] = {}
        # Rows allocated over all tries.
        self._rows = 0
        self.dropped_tenants = 0

    def tenant(self, name: str) -> NgramTrie:
        """The tenant's trie, made when missing."""
        with self._lock:
            trie = self._tenants.get(name)
            if trie is None:
                config = self._config
                trie = NgramTrie(config.depth, config.tenant_capacity, config.half_life_log2)
                self._tenants[name] = trie
                self._rows += len(trie.rows)
            self._tenants.move_to_end(name)
            return trie

    def shared(self, name: str) -> NgramTrie:
        """A shared corpus. Raises `UnknownCorpus`."""
        trie = self.find_shared(name)
        if trie is None:
            raise _unknown()
        return trie

    def find_shared(self, name: str) -> NgramTrie | None:
        """A shared corpus, unless there is none of that name any more."""
        with self._lock:
            corpus = self._shared.get(name)
        return None if corpus is None else corpus.trie

    def learn(self, tenant: str, context: Tokens, token_ids: Tokens, weight: int) -> None:
        """Teach a tenant's trie what one of its sequences said, and drop idle tenants if that takes too much room."""
        trie = self.tenant(tenant)
        rows_before = len(trie.rows)
        trie.insert(token_ids, context, weight)
        self._settle(trie, rows_before, keep=tenant)

    def add(self, tenant: str, corpus: str, token_ids: Tokens) -> CorpusGrowth:
        """Teach a document. See `CorpusDrafter.add_corpus`."""
        trie = self._made_by(tenant, corpus) if corpus else self.tenant(tenant)
        rows_before, room = len(trie.rows), self._document_room(tenant, corpus)
        learnt, made = trie.insert_within(token_ids, room, UNIT)
        with self._lock:
            if corpus:
                self._shared[corpus].documents += learnt > 0
            else:
                self._document_nodes[tenant] = self._document_nodes.get(tenant, 0) + made
                self._documents[tenant] = self._documents.get(tenant, 0) + (learnt > 0)
        self._settle(trie, rows_before, keep=tenant)
        if learnt < len(token_ids):
            raise QuotaExceeded("the corpus quota is used up", learnt_tokens=learnt, nodes=trie.nodes)
        return CorpusGrowth(learnt, trie.nodes)

    def delete(self, tenant: str | None, name: str) -> CorpusInfo:
        """Forget a shared corpus. See `CorpusDrafter.delete_corpus`. Call where lessons are learnt."""
        with self._lock:
            corpus = self._shared.get(name)
            # One answer for both, so that it tells nothing of what belongs to others.
            if corpus is None or tenant not in (None, corpus.owner):
                raise _unknown()
            del self._shared[name]
            self._rows -= len(corpus.trie.rows)
        return _described(name, corpus.owner, corpus.trie, corpus.documents)

    def listed(self, tenant: str) -> list[CorpusInfo]:
        """What a tenant may draft from. See `CorpusDrafter.corpora`."""
        with self._lock:
            own = self._tenants.get(tenant)
            shared = [
                _described(name, corpus.owner, corpus.trie, corpus.documents)
                for name, corpus in sorted(self._shared.items())
            ]
            if own is None or not own.nodes:
                return shared
            return [_described("", tenant, own, self._documents.get(tenant, 0)), *shared]

    def _made_by(self, tenant: str, name: str) -> NgramTrie:
        with self._lock:
            corpus = self._shared.get(name)
            if corpus is None:
                if sum(shared.owner == tenant for shared in self._shared.values()) >= _MOST_CORPORA:
                    raise QuotaExceeded("the tenant has as many corpora as it may", limit=_MOST_CORPORA).after(None)
                if len(self._shared) >= _MOST_SHARED:
                    raise QuotaExceeded("there are as many corpora as there may be", limit=_MOST_SHARED).after(None)
                corpus = SharedCorpus(tenant, NgramTrie(self._config.depth, self._config.corpus_capacity, NEVER_LOG2))
                self._shared[name] = corpus
                self._rows += len(corpus.trie.rows)
        if corpus.owner != tenant:
            raise PermissionDenied("the corpus belongs to another tenant")
        return corpus.trie

    def _document_room(self, tenant: str, corpus: str) -> int:
        """Nodes that documents of this tenant may still take."""
        if not corpus:
            room = int(self._config.tenant_capacity * _DOCUMENT_SHARE) - self._document_nodes.get(tenant, 0)
            return max(0, room)
        with self._lock:
            tries = [shared.trie for shared in self._shared.values()]
            mine = [shared.trie for shared in self._shared.values() if shared.owner == tenant]
        own_room = self._config.corpus_capacity - sum(trie.nodes for trie in mine)
        shared_room = int(self._config.capacity * _SHARED_SHARE) - sum(trie.nodes for trie in tries)
        return max(0, min(own_room, shared_room))

    def _settle(self, trie: NgramTrie, rows_before: int, keep: str) -> None:
        """Drop whole tenants, the longest unused first, while all tries together take more than the capacity."""
        with self._lock:
            self._rows += len(trie.rows) - rows_before
            while self._rows > self._config.capacity:
                idle = next((name for name in self._tenants if name != keep), None)
                if idle is None:
                    return
                self._rows -= len(self._tenants.pop(idle).rows)
                self._document_nodes.pop(idle, None)
                self._documents.pop(idle, None)
                self.dropped_tenants += 1

    def figures(self) -> dict[str, float]:
        """Sums over all tries, for metrics."""
        with self._lock:
            tries = [*self._tenants.values(), *(corpus.trie for corpus in self._shared.values())]
            return {
                "trie_tenants": len(self._tenants),
                "trie_corpora": len(self._shared),
                "trie_nodes": sum(trie.nodes for trie in tries),
                "trie_bytes": sum(trie.bytes for trie in tries),
                "trie_evictions": sum(trie.evictions for trie in tries),
                "trie_dropped_tenants": self.dropped_tenants,
            }

    def contents(self) -> list[StoredTrie]:
        """Every trie, for a snapshot. Call where lessons are learnt, and use before the next."""
        with self._lock:
            tenants = [
                StoredTrie(name, "", trie.rows[: trie.used], self._documents.get(name, 0))
                for name, trie in self._tenants.items()
            ]
            return tenants + [
                StoredTrie(corpus.owner, name, corpus.trie.rows[: corpus.trie.used], corpus.documents)
                for name, corpus in self._shared.items()
            ]

    def restore(self, stored: Sequence[StoredTrie]) -> list[StoredTrie]:
        """Take in a snapshot; returns what does not form a trie, which is left out. Call before anything is learnt."""
        config = self._config
        tenants: OrderedDict[str, NgramTrie] = OrderedDict()
        shared: dict[str, SharedCorpus] = {}
        documents: dict[str, int] = {}
        unsound: list[StoredTrie] = []
        for item in stored:
            capacity = config.corpus_capacity if item.corpus else config.tenant_capacity
            half_life = NEVER_LOG2 if item.corpus else config.half_life_log2
            try:
                trie = NgramTrie.restored(item.rows, config.depth, capacity, half_life)
            except ValueError:
                unsound.append(item)
                continue
            if item.corpus:
                shared[item.corpus] = SharedCorpus(item.tenant, trie, item.documents)
            else:
                tenants[item.tenant] = trie
                documents[item.tenant] = item.documents
        with self._lock:
            self._tenants, self._shared, self._documents = tenants, shared, documents
            self._rows = sum(len(trie.rows) for trie in tenants.values())
            self._rows += sum(len(corpus.trie.rows) for corpus in shared.values())
        return unsound


def _unknown() -> UnknownCorpus:
    return UnknownCorpus("no corpus of that name was added")


def _described(name: str, owner: str, trie: NgramTrie, documents: int) -> CorpusInfo:
    return CorpusInfo(name, owner, trie.tokens, documents, trie.nodes, trie.bytes)
