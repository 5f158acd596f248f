"""Which of several drafts has read the beginning of a text, as far as this target knows: the draft that it was sent to.

A draft keeps keys and values of what it has read. A text goes where most of its beginning went, so a conversation stays
at one draft, and what begins with the same long prompt follows it until that draft has more than its share.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

# Tokens of a block, the default page of a draft's cache: less than that is never shared.
_BLOCK = 64


class PrefixHomes:
    """Where texts went, by address, each block of them with all before it. Tenants share nothing."""

    # Blocks that are remembered: four million tokens. Chosen: many times a draft's cache.
    def __init__(self, most_blocks: int = 65_536) -> None:
        self._most = most_blocks
        # The least recently used first.
        self._home_of: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, tenant: str, token_ids: Sequence[int], homes: Iterable[str], connected: Collection[str]) -> str:
        """The address of `connected` that shall follow a text: where the longest beginning of it went, of those that
        follow no more than their share; empty where it went to none of them. `homes` has the address of each sequence
        under way."""
        loads = Counter(homes)
        # A draft takes sequences for what it has read until it follows this many times the mean. The gateway's own
        # default.
        capacity = math.ceil(1.25 * (loads.total() + 1) / len(connected))
        found = ""
        for block in _blocks(tenant, token_ids):
            home = self._home_of.get(block)
            if home is None:
                break
            if home in connected and loads[home] < capacity:
                found = home
        return found

    def note(self, tenant: str, token_ids: Sequence[int], address: str) -> None:
        """The text went to this address."""
        for block in _blocks(tenant, token_ids):
            self._home_of[block] = address
            self._home_of.move_to_end(block)
        while len(self._home_of) > self._most:
            self._home_of.popitem(last=False)

    def forget(self, address: str) -> None:
        """The draft at this address was lost, and with it what it had read."""
        for block in [block for block, home in self._home_of.items() if home == address]:
            del self._home_of[block]


def _blocks(tenant: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """A name for each whole block of a text with all before it."""
    before = tenant.encode()
    for start in range(0, len(token_ids) - _BLOCK + 1, _BLOCK):
        tokens = array("I", token_ids[start : start + _BLOCK]).tobytes()
        before = blake2b(before + b"\0" + tokens, digest_size=16).digest()
        yield before
