"""The tries of all tenants: one per tenant, and shared corpora by name. Nothing leaks from one tenant to another.

A shared corpus is read only by sequences that name it, and only the tenant that made it may add to it or delete it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.base import CorpusGrowth
from draft_service.ngram.arrays import HALF_LIFE_LOG2, NEVER_LOG2, Rows, Tokens
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.prediction import UNIT
from draft_service.ngram.trie import NgramTrie
from outrider.errors import PermissionDenied, QuotaExceeded, UnknownCorpus
from outrider.wire.frames import CorpusInfo

log = logging.getLogger(__name__)
# Shared corpora of one tenant; each stays until its owner deletes it.
_MOST_CORPORA = 16
# Over all tenants, so that one message of 200 KB lists them. Chosen, not measured: 64 tenants with all they may have.
_MOST_SHARED = 1024


@dataclass(slots=True)
class _OwnedTrie:
    """A tenant's own trie, or a shared corpus: who made it, documents inserted, and nodes made by them."""

    owner: str
    trie: NgramTrie
    documents: int = 0
    document_nodes: int = 0

    def described(self, corpus: str) -> CorpusInfo:
        """An entry of a list of corpora; `corpus` is empty for a tenant's own trie."""
        return CorpusInfo(corpus, self.owner, self.trie.tokens, self.documents, self.trie.nodes, self.trie.bytes)


@dataclass(frozen=True, slots=True)
class StoredTrie:
    """The used rows of one trie, [n, COLUMNS] int32, and the documents inserted into it; `corpus` is empty for a
    tenant's own."""

    tenant: str
    corpus: str
    rows: Rows
    documents: int = 0


class Corpora:
    """Finds, makes and bounds tries. One thread learns; any thread looks up."""

    def __init__(self, config: TrieConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        # Least recently used first.
        self._tenants: OrderedDict[str, _OwnedTrie] = OrderedDict()
        self._shared: dict[str, _OwnedTrie] = {}
        # Rows allocated over all tries.
        self._rows = 0
        self.dropped_tenants = 0

    def find_tenant(self, name: str) -> NgramTrie | None:
        """The tenant's trie; None if nothing is inserted in it (any more)."""
        with self._lock:
            if name not in self._tenants:
                return None
            self._tenants.move_to_end(name)
            return self._tenants[name].trie

    def check_shared(self, name: str) -> None:
        """Raise `UnknownCorpus` unless there is a shared corpus of this name."""
        if self.find_shared(name) is None:
            raise _unknown()

    def find_shared(self, name: str) -> NgramTrie | None:
        """A shared corpus; None if there is none of that name (any more)."""
        with self._lock:
            corpus = self._shared.get(name)
        return None if corpus is None else corpus.trie

    def insert(self, tenant: str, context: Tokens, token_ids: Tokens, weight: int) -> None:
        """Learn tokens of a tenant's sequence, and drop idle tenants if that takes too much room."""
        trie = self._of_tenant(tenant).trie
        rows_before = len(trie.rows)
        trie.insert(token_ids, context, weight)
        self._settle(trie, rows_before, keep=tenant)

    def add(self, tenant: str, corpus: str, token_ids: Tokens) -> CorpusGrowth:
        """Learn a document. See `CorpusDrafter.add_corpus`."""
        owned = self._made_by(tenant, corpus) if corpus else self._of_tenant(tenant)
        trie = owned.trie
        rows_before, room = len(trie.rows), self._document_room(owned, corpus)
        inserted, made = trie.insert(token_ids, weight=UNIT, most_nodes=room)
        with self._lock:
            owned.documents += inserted > 0
            owned.document_nodes += made
        self._settle(trie, rows_before, keep=tenant)
        if inserted < len(token_ids):
            raise QuotaExceeded("the corpus quota is used up", learnt_tokens=inserted, nodes=trie.nodes)
        return CorpusGrowth(inserted, trie.nodes)

    def delete(self, tenant: str | None, name: str) -> CorpusInfo:
        """Delete a shared corpus. See `CorpusDrafter.delete_corpus`. On the learning thread."""
        with self._lock:
            corpus = self._shared.get(name)
            # One error for both, so that it reveals nothing about other tenants.
            if corpus is None or tenant not in (None, corpus.owner):
                raise _unknown()
            del self._shared[name]
            self._rows -= len(corpus.trie.rows)
        return corpus.described(name)

    def listed(self, tenant: str) -> list[CorpusInfo]:
        """What a tenant may draft from. See `CorpusDrafter.corpora`."""
        with self._lock:
            own = self._tenants.get(tenant)
            shared = [self._shared[name].described(name) for name in sorted(self._shared)]
            return shared if own is None or not own.trie.nodes else [own.described(""), *shared]

    def _of_tenant(self, name: str) -> _OwnedTrie:
        """The tenant's trie, made when missing."""
        with self._lock:
            if name not in self._tenants:
                self._tenants[name] = self._made(name, self._config.tenant_capacity, HALF_LIFE_LOG2)
            self._tenants.move_to_end(name)
            return self._tenants[name]

    def _made_by(self, tenant: str, name: str) -> _OwnedTrie:
        """The shared corpus of this tenant, made when missing."""
        with self._lock:
            corpus = self._shared.get(name)
            if corpus is None:
                if sum(shared.owner == tenant for shared in self._shared.values()) >= _MOST_CORPORA:
                    raise QuotaExceeded("the tenant has as many corpora as it may", limit=_MOST_CORPORA).after(None)
                if len(self._shared) >= _MOST_SHARED:
                    raise QuotaExceeded("there are as many corpora as there may be", limit=_MOST_SHARED).after(None)
                corpus = self._shared[name] = self._made(tenant, self._config.corpus_capacity, NEVER_LOG2)
        if corpus.owner != tenant:
            raise PermissionDenied("the corpus belongs to another tenant")
        return corpus

    def _made(self, owner: str, capacity: int, half_life_log2: int) -> _OwnedTrie:
        trie = NgramTrie(self._config.depth, capacity, half_life_log2)
        self._rows += len(trie.rows)
        return _OwnedTrie(owner, trie)

    def _document_room(self, owned: _OwnedTrie, corpus: str) -> int:
        """Nodes that documents of a trie's owner may still take."""
        if not corpus:
            # Most of a tenant's trie for documents, so that its sequences keep room.
            return max(0, int(self._config.tenant_capacity * 0.5) - owned.document_nodes)
        with self._lock:
            shared = list(self._shared.values())
        own_nodes = sum(one.trie.nodes for one in shared if one.owner == owned.owner)
        own_room = self._config.corpus_capacity - own_nodes
        # Most of the capacity for shared corpora, which are never dropped; tenants' tries keep the rest.
        shared_room = int(self._config.capacity * 0.5) - sum(one.trie.nodes for one in shared)
        return max(0, min(own_room, shared_room))

    def _settle(self, trie: NgramTrie, rows_before: int, keep: str) -> None:
        """Drop whole tenants, the least recently used first, while all tries together exceed the capacity."""
        with self._lock:
            self._rows += len(trie.rows) - rows_before
            while self._rows > self._config.capacity:
                idle = next((name for name in self._tenants if name != keep), None)
                if idle is None:
                    return
                self._rows -= len(self._tenants.pop(idle).trie.rows)
                self.dropped_tenants += 1

    def figures(self) -> dict[str, float]:
        with self._lock:
            tries = [owned.trie for owned in (*self._tenants.values(), *self._shared.values())]
            return {
                "trie_tenants": len(self._tenants),
                "trie_corpora": len(self._shared),
                "trie_nodes": sum(trie.nodes for trie in tries),
                "trie_bytes": sum(trie.bytes for trie in tries),
                "trie_evictions": sum(trie.evictions for trie in tries),
                "trie_dropped_tenants": self.dropped_tenants,
            }

    def contents(self) -> list[StoredTrie]:
        """Every trie, for a snapshot. On the learning thread; valid until that learns again."""
        with self._lock:
            named = [("", owned) for owned in self._tenants.values()] + [*self._shared.items()]
        return [
            StoredTrie(owned.owner, name, owned.trie.rows[: owned.trie.used], owned.documents) for name, owned in named
        ]

    def restore(self, stored: Sequence[StoredTrie]) -> list[tuple[str, str]]:
        """Load a snapshot; returns tenant and corpus of entries that are no valid trie, which are skipped. Call before
        anything is inserted."""
        config = self._config
        tenants: OrderedDict[str, _OwnedTrie] = OrderedDict()
        shared: dict[str, _OwnedTrie] = {}
        unsound: list[tuple[str, str]] = []
        for item in stored:
            capacity = config.corpus_capacity if item.corpus else config.tenant_capacity
            half_life = NEVER_LOG2 if item.corpus else HALF_LIFE_LOG2
            try:
                trie = NgramTrie.restored(item.rows, config.depth, capacity, half_life)
            except ValueError:
                unsound.append((item.tenant, item.corpus))
                continue
            if trie.used < len(item.rows):
                log.warning(
                    "a trie of the snapshot is cut from %d to %d nodes, since it may have %d now: tenant %r, %r",
                    *(len(item.rows), trie.used, capacity, item.tenant, item.corpus),
                )
            owned = _OwnedTrie(item.tenant, trie, item.documents)
            (shared if item.corpus else tenants)[item.corpus or item.tenant] = owned
        with self._lock:
            self._tenants, self._shared = tenants, shared
            self._rows = sum(len(owned.trie.rows) for owned in (*tenants.values(), *shared.values()))
        return unsound


def _unknown() -> UnknownCorpus:
    return UnknownCorpus("no corpus of that name was added")
