"""Whose tries there are: one per tenant, and shared corpora by name. Nothing crosses from one tenant to another."""

from __future__ import annotations

from collections import OrderedDict

from draft_service.ngram_config import NEVER_LOG2, TrieConfig
from draft_service.ngram_trie import NgramTrie
from outrider.errors import UnknownCorpus


class Corpora:
    """Finds and makes tries, within the capacity set."""

    def __init__(self, config: TrieConfig) -> None:
        self._config = config
        self._tenants: OrderedDict[str, NgramTrie] = OrderedDict()
        self._shared: dict[str, NgramTrie] = {}

    def tenant(self, name: str) -> NgramTrie:
        trie = self._tenants.get(name)
        if trie is None:
            trie = NgramTrie(self._config.depth, self._config.tenant_capacity, self._config.half_life_log2)
            self._tenants[name] = trie
        self._tenants.move_to_end(name)
        return trie

    def shared(self, name: str) -> NgramTrie:
        trie = self._shared.get(name)
        if trie is None:
            raise UnknownCorpus("no corpus of that name was added")
        return trie
