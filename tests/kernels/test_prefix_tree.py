"""The tree of prefixes by itself: what is found, what gives way, and that its pages add up."""

from __future__ import annotations

import random

import pytest

from tree_kernels.pages import OutOfPages, Pages
from tree_kernels.prefix_tree import PrefixNode, PrefixTree


class Holder:
    """What a sequence does with its pages: it shares what is found, fills the rest, and lets go of all."""

    def __init__(self, pages: Pages, tree: PrefixTree, tenant: str, tokens: list[int]) -> None:
        self._pages, self._tree = pages, tree
        nodes = tree.match(tenant, tokens, len(tokens))
        self.found = len(nodes)
        self.pages = [node.page for node in nodes]
        pages.share(self.pages)
        node: PrefixNode | None = nodes[-1] if nodes else None
        size = pages.page_size
        try:
            self.pages += pages.allocate(len(tokens) // size - self.found)
        except OutOfPages:
            pages.release(self.pages)
            raise
        for place in range(self.found, len(tokens) // size):
            node = tree.insert(tenant, node, tokens[place * size : (place + 1) * size], self.pages[place])
            assert node.page == self.pages[place]
        self._node = node

    def leave(self) -> None:
        if self._node is not None:
            self._tree.use(self._node)
        self._pages.release(self.pages)


@pytest.mark.parametrize("page_size", [1, 3])
def test_any_order_of_holders_keeps_the_books(page_size: int) -> None:
    chance = random.Random(page_size)
    pages = Pages(24, page_size)
    tree = PrefixTree(pages)
    held: list[Holder] = []
    refused = found = 0
    for _ in range(600):
        if held and chance.random() < 0.45:
            held.pop(chance.randrange(len(held))).leave()
        elif not held and chance.random() < 0.3:
            # Only then may it be.
            tree.clear()
        else:
            # Few texts, so that they begin alike.
            tokens = [chance.randrange(2) for _ in range(page_size * chance.randrange(1, 9))]
            try:
                held.append(Holder(pages, tree, chance.choice("ab"), tokens))
                found += held[-1].found
            except OutOfPages:
                refused += 1
                assert pages.free_pages < 8
        pages.check_integrity([one.pages for one in held], tree.pages())
    assert (refused > 0, found > 50) == (True, True), (refused, found)
    for one in held:
        one.leave()
    # Nobody holds a page: all of them can be had.
    assert len(pages.allocate(24)) == 24 and len(tree) == 0


def test_the_least_recently_used_text_gives_way() -> None:
    pages = Pages(40, 1)
    tree = PrefixTree(pages)
    for text in ([1] * 3, [2] * 3, [3] * 32):
        Holder(pages, tree, "", text).leave()
    assert len(tree.match("", [1] * 3, 3)) == 3
    Holder(pages, tree, "", [1] * 3).leave()
    pages.allocate(3)
    assert [len(tree.match("", [text] * 3, 3)) for text in (1, 2)] == [3, 0]


def test_a_cache_takes_the_place_of_an_earlier_one() -> None:
    pages = Pages(4, 1)
    Holder(pages, PrefixTree(pages), "", [1, 2, 3]).leave()
    assert pages.spare_pages == 3
    tree = PrefixTree(pages)
    assert pages.spare_pages == 0 and len(tree) == 0
    pages.check_integrity([])


def test_tenants_share_public_text_and_nothing_behind_it() -> None:
    pages = Pages(40, 2)
    tree = PrefixTree(pages)
    # Its last token fills no page.
    tree.publish([1, 2, 3, 4, 5])
    tree.publish([1, 2, 9, 9])
    Holder(pages, tree, "a", [1, 2, 3, 4, 5, 6]).leave()
    assert [Holder(pages, tree, tenant, [1, 2, 3, 4, 5, 6]).found for tenant in ("a", "b", "b")] == [3, 2, 3]
    # Of the other text the first page, which both begin with.
    assert [Holder(pages, tree, tenant, [1, 2, 9, 9, 7, 7]).found for tenant in ("a", "b")] == [1, 2]
    # The same tokens elsewhere are a tenant's own.
    assert [Holder(pages, tree, tenant, [8, 8, 1, 2]).found for tenant in ("a", "b")] == [0, 0]
