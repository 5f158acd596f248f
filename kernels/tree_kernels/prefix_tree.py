"""Which pages hold the keys of which text: a radix tree over whole pages, in which tenants find their own text only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack
from typing import Protocol

from tree_kernels.pages import Pages

# Pages that are taken back at once, at least: each search passes over the pages in use. Chosen.
_BATCH = 32
# Of a key.
_TOKEN_BYTES = 4


class PageStates(Protocol):
    """Hidden states of a page's tokens, in the form in which they are sent."""

    @property
    def nbytes(self) -> int: ...


# Whose page it is, None for everybody's, and its tokens as int32.
_Key = tuple[str | None, bytes]


@dataclass(frozen=True, slots=True)
class PageChange:
    """A page was inserted, or taken out; with a `hash` of 0 every page was."""

    hash: int  # of the page's text with all before it, and its owner; 64 bits
    inserted: bool = False
    # Of an inserted page: the hash of the one before it, 0 at the text's beginning; its owner, empty where it is
    # public; and its tokens as int32.
    parent: int = 0
    tenant: str = ""
    tokens: bytes = b""


class _PublicPages(dict[bytes, "_PublicPages"]):
    """Pages of text that all tenants may share, by their tokens, each with those that may follow it."""

    def add(self, token_ids: SequenceOf[int], page_size: int, key_tokens: int) -> None:
        """Let whole pages of the text be everybody's."""
        pages = self
        for start in range(0, len(token_ids) - key_tokens + 1, page_size):
            pages = pages.setdefault(_bytes(token_ids[start : start + key_tokens]), _PublicPages())


_NONE_PUBLIC = _PublicPages()


class PrefixNode:
    """One page in the tree: the keys of `page_size` tokens behind those of all nodes above it."""

    __slots__ = ("children", "hash", "key", "page", "parent", "public", "states")

    def __init__(self, parent: PrefixNode | None, key: _Key, page: int, public: _PublicPages) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.public = public  # public pages that may follow
        self.children: dict[_Key, PrefixNode] = {}
        self.states: PageStates | None = None
        self.hash = 0  # where changes are recorded

    def path(self) -> list[PrefixNode]:
        """The nodes from the root's child down to this one."""
        nodes: list[PrefixNode] = []
        node: PrefixNode = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixTree:
    """Pages of text that was read once, for other sequences of the same tenant that begin with it, and of all tenants
    where the text is public.

    A page is inserted once its last key is computed and the token behind it is known. It stays when its sequences end,
    until its memory is needed: the least recently used page without others behind it goes first, and never one that a
    sequence holds.
    """

    def __init__(self, pages: Pages, successors: int = 0, *, records: bool = False) -> None:
        """`successors`: how many tokens behind a page its keys depend on too. A head's depend on the next one.
        `records`: keep what changes for `pop_changes`."""
        self._pages = pages
        self._changes: list[PageChange] | None = [] if records else None
        # Tokens of a node's key.
        self.key_tokens = pages.page_size + successors
        self._root = PrefixNode(None, (None, b""), -1, _PublicPages())
        # All nodes, the least recently used first. A node without holders comes after those behind it.
        self._by_use: OrderedDict[PrefixNode, None] = OrderedDict()
        # Bytes of the hidden states of all nodes.
        self.state_bytes = 0
        self._forget: Callable[[PrefixNode], None] | None = None
        pages.cached_by(self._take_back)

    def when_forgotten(self, forget: Callable[[PrefixNode], None]) -> None:
        """Call `forget` with each page that leaves the tree."""
        self._forget = forget

    def public_tokens(self, token_ids: SequenceOf[int]) -> int:
        """Tokens of the text's first pages that all tenants share."""
        pages, size, start = self._root.public, self._pages.page_size, 0
        while (after := pages.get(_bytes(token_ids[start : start + self.key_tokens]))) is not None:
            pages, start = after, start + size
        return start

    def __len__(self) -> int:
        """Pages in the tree."""
        return len(self._by_use)

    def pages(self) -> list[int]:
        return [node.page for node in self._by_use]

    def publish(self, token_ids: SequenceOf[int]) -> None:
        """Let tenants share pages of this text, of whichever computes them first. Only while the tree is empty."""
        assert not self._by_use, "pages of the text may be in the tree as a tenant's own"
        self._root.public.add(token_ids, self._pages.page_size, self.key_tokens)

    def match(self, tenant: str, token_ids: SequenceOf[int], most: int) -> list[PrefixNode]:
        """The nodes that hold the text's beginning, first page first: whole pages of at most `most` tokens, where their
        successors are known too."""
        node, size, nodes = self._root, self._pages.page_size, list[PrefixNode]()
        last = min(most - size, len(token_ids) - self.key_tokens)
        # All at once: by the page, most of a long text's time is that of its slices.
        text, key_bytes = _bytes(token_ids[: last + self.key_tokens]), _TOKEN_BYTES * self.key_tokens
        for start in range(0, _TOKEN_BYTES * (last + 1), _TOKEN_BYTES * size):
            following = node.children.get(_key(node, tenant, text[start : start + key_bytes]))
            if following is None:
                break
            node = following
            nodes.append(node)
        return nodes

    def insert(self, tenant: str, parent: PrefixNode | None, token_ids: SequenceOf[int], page: int) -> PrefixNode:
        """The node of these `key_tokens` tokens, a page of them and its successors, behind `parent`, or at the text's
        beginning. A new one caches `page`; an old one has a page of its own."""
        above = parent or self._root
        key = _key(above, tenant, _bytes(token_ids))
        node = above.children.get(key)
        if node is None:
            self._pages.cache(page)
            public = above.public.get(key[1], _NONE_PUBLIC)
            node = above.children[key] = PrefixNode(above, key, page, public)
            # Whoever inserts a node holds its path, and counts all of it as used at its end: not for each page, since a
            # path of n pages would take n * n moves.
            self._by_use[node] = None
            if self._changes is not None:
                node.hash = _chained(above.hash, key)
                self._changes.append(PageChange(node.hash, True, above.hash, key[0] or "", key[1]))
        return node

    def pop_changes(self) -> list[PageChange]:
        """What was inserted and taken out since the last call, in order."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def keep_states(self, node: PrefixNode, states: PageStates) -> None:
        """Keep hidden states beside the node's page. If there are too many, unused pages go with theirs."""
        node.states = states
        self.state_bytes += states.nbytes
        # Bytes of hidden states beside all pages, in the host's memory. Chosen: 260,000 tokens of a head that reads
        # 4,096 numbers of each in bf16.
        if self.state_bytes > 2 << 30:
            self._take_back(1)

    def use(self, node: PrefixNode) -> None:
        """Count the node, and all above it, as used now."""
        while node.parent is not None:
            self._by_use.move_to_end(node)
            node = node.parent

    def clear(self) -> None:
        """Forget every page: their keys are of other weights."""
        for node in self._by_use:
            self._pages.uncache(node.page)
            if self._forget is not None:
                self._forget(node)
        if self._changes is not None and self._by_use:
            self._changes = [PageChange(0)]
        self._by_use.clear()
        self._root.children.clear()
        self.state_bytes = 0

    def _take_back(self, count: int) -> None:
        wanted = max(count, _BATCH)
        # One pass takes all that are spare, in the order of their use; until none is left, whatever that order.
        while wanted > 0 and (taken := self._detach_spare(wanted)):
            for node in taken:
                del self._by_use[node]
                self._pages.uncache(node.page)
            wanted -= len(taken)

    def _detach_spare(self, most: int) -> list[PrefixNode]:
        """Take up to `most` nodes without holders out of the tree, the least recently used first."""
        taken: list[PrefixNode] = []
        for node in self._by_use:
            # A node comes behind its children: its last child has left it by then.
            if self._pages.is_spare(node.page) and not node.children:
                self._detach(node)
                taken.append(node)
                if len(taken) == most:
                    break
        return taken

    def _detach(self, node: PrefixNode) -> None:
        assert node.parent is not None
        self.state_bytes -= node.states.nbytes if node.states is not None else 0
        del node.parent.children[node.key]
        if self._forget is not None:
            self._forget(node)
        if self._changes is not None:
            self._changes.append(PageChange(node.hash))


def _key(above: PrefixNode, tenant: str, tokens: bytes) -> _Key:
    """The key of a page behind `above`, of these int32 tokens. Behind a tenant's own page nothing is public."""
    return (None if tokens in above.public else tenant), tokens


def _chained(before: int, key: _Key) -> int:
    """Never 0, which stands for no page."""
    tenant, tokens = key
    digest = blake2b(before.to_bytes(8, "big"), digest_size=8)
    # Names of tenants have no such byte, and everybody's pages no name.
    digest.update((tenant or "").encode() + b"\0" + tokens)
    return int.from_bytes(digest.digest(), "big") or 1


def _bytes(token_ids: SequenceOf[int]) -> bytes:
    # Takes half of the time of an array of them.
    return pack(f"{len(token_ids)}i", *token_ids)
