"""The flat-array trie against a plain dictionary of windows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from trie_checks import check_integrity, count, longest_match

from draft_service.ngram.arrays import MAX_CLOCK, ROOT, SEEN
from draft_service.ngram.trie import NgramTrie

DEPTH = 4
documents = st.lists(st.lists(st.integers(0, 4), max_size=40), min_size=1, max_size=6)


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def windows(tokens: Sequence[int], depth: int) -> Counter[tuple[int, ...]]:
    """The oracle: every window of at most `depth` tokens, counted."""
    return Counter(
        tuple(tokens[end - length : end])
        for end in range(1, len(tokens) + 1)
        for length in range(1, min(depth, end) + 1)
    )


@examples(60)
@given(documents)
def test_counts_are_those_of_a_dictionary(texts: list[list[int]]) -> None:
    trie, expected = NgramTrie(DEPTH, 100_000), Counter[tuple[int, ...]]()
    for text in texts:
        trie.insert(ids(text))
        expected += windows(text, DEPTH)
    assert trie.nodes == len(expected)
    assert {window: count(trie, window) for window in expected} == dict(expected)
    assert trie.tokens == sum(map(len, texts))
    check_integrity(trie)


@examples(60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_pieces_with_context_count_as_the_whole(text: list[int], data: st.DataObject) -> None:
    whole, pieces = NgramTrie(DEPTH, 100_000), NgramTrie(DEPTH, 100_000)
    whole.insert(ids(text))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)) | {0, len(text)})
    for begin, end in itertools.pairwise(cuts):
        pieces.insert(ids(text[begin:end]), ids(text[:begin]))
    assert pieces.nodes == whole.nodes
    assert all(count(pieces, window) == count(whole, window) for window in windows(text, DEPTH))
    check_integrity(pieces)


@examples(60)
@given(documents, st.lists(st.integers(0, 5), max_size=10), st.integers(1, DEPTH))
def test_the_longest_match_is_the_longest_known_suffix(
    texts: list[list[int]], context: list[int], longest: int
) -> None:
    trie, known = NgramTrie(DEPTH, 100_000), Counter[tuple[int, ...]]()
    for text in texts:
        trie.insert(ids(text))
        known += windows(text, DEPTH)
    suffixes = [n for n in range(1, min(longest, len(context)) + 1) if tuple(context[-n:]) in known]
    assert longest_match(trie, context, longest) == max(suffixes, default=0)


@examples(60)
@given(documents, st.integers(10, 200))
def test_eviction_keeps_the_bound_and_the_structure(texts: list[list[int]], capacity: int) -> None:
    trie = NgramTrie(DEPTH, capacity)
    for text in texts:
        trie.insert(ids(text))
        assert trie.used <= len(trie.rows) <= capacity
        check_integrity(trie)


def test_eviction_drops_the_least_useful() -> None:
    rng = np.random.default_rng(0)
    trie = NgramTrie(DEPTH, 4_000)
    often, once = list(range(100, 110)), list(range(200, 210))
    trie.insert(ids(once))
    for _ in range(200):
        trie.insert(ids(often))
        trie.insert(rng.integers(300, 5_000, 40).astype(np.int32))
    assert trie.evictions > 0
    assert count(trie, often[:DEPTH]) > 100
    assert count(trie, once[:DEPTH]) == 0
    check_integrity(trie)


def test_a_weight_counts_as_so_many_occurrences() -> None:
    trie = NgramTrie(DEPTH, 1_000)
    trie.insert(ids([1, 2, 3]), weight=5)
    trie.insert(ids([1, 2]), weight=2)
    assert (count(trie, [1, 2]), count(trie, [2, 3])) == (7, 5)


@pytest.mark.parametrize("half_lives", [1, 2, 3])
def test_counts_halve_with_every_half_life(half_lives: int) -> None:
    trie = NgramTrie(DEPTH, 100_000, half_life_log2=6)
    trie.insert(ids([1, 2, 3]), weight=64)
    # The clock stands at 3; this many tokens later it stands in the named half-life.
    trie.insert(ids([9] * (64 * half_lives)))
    assert count(trie, [1, 2, 3]) == 64 >> half_lives
    trie.insert(ids([1, 2, 3]), weight=64)
    assert count(trie, [1, 2, 3]) == 64 + (64 >> half_lives)


def test_children_stand_in_order_of_recency() -> None:
    trie = NgramTrie(2, 1_000)
    for token in (3, 1, 2, 1):
        trie.insert(ids([token]))
    order, child = [], int(trie.rows[ROOT, 2])
    while child:
        order.append(int(trie.rows[child, 0]))
        child = int(trie.rows[child, 3])
    assert order == [1, 2, 3]


def test_a_budget_bounds_what_is_made() -> None:
    trie = NgramTrie(DEPTH, 10_000)
    learnt, made = trie.insert(ids(range(1_000)), most_nodes=400)
    assert 0 < learnt < 1_000
    assert made == trie.nodes <= 400
    assert trie.insert(ids(range(10)), most_nodes=0) == (0, 0)


def test_restored_rows_are_the_same_trie() -> None:
    trie = NgramTrie(DEPTH, 10_000)
    trie.insert(np.random.default_rng(1).integers(0, 20, 500).astype(np.int32))
    copy = NgramTrie.restored(trie.rows[: trie.used], DEPTH, 10_000, trie.half_life_log2)
    check_integrity(copy)
    assert np.array_equal(copy.rows[: copy.used], trie.rows[: trie.used])
    copy.insert(ids([1, 2, 3]))
    check_integrity(copy)


@pytest.mark.parametrize("column", range(1, 8), ids=["parent", "child", "next", "previous", "count", "link", "seen"])
@pytest.mark.parametrize("value", [-1, 1 << 30], ids=["negative", "huge"])
def test_unsound_rows_are_refused(column: int, value: int) -> None:
    trie = NgramTrie(DEPTH, 10_000)
    trie.insert(ids([1, 2, 1, 3, 1, 2]))
    rows = trie.rows[: trie.used].copy()
    rows[trie.used // 2, column] = value
    if (column, value) == (5, 1 << 30):
        NgramTrie.restored(rows, DEPTH, 10_000, 20)
        return
    with pytest.raises(ValueError, match="do not form a trie"):
        NgramTrie.restored(rows, DEPTH, 10_000, 20)


def test_a_cycle_of_siblings_is_refused() -> None:
    trie = NgramTrie(2, 1_000)
    trie.insert(ids([1, 2, 3]))
    rows = trie.rows[: trie.used].copy()
    last = int(rows[ROOT, 2])
    rows[last, 3] = last
    with pytest.raises(ValueError, match="do not form a trie"):
        NgramTrie.restored(rows, 2, 1_000, 20)


@pytest.mark.parametrize(("depth", "capacity"), [(1, 100), (65, 1_000), (8, 15)])
def test_senseless_sizes_are_refused(depth: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        NgramTrie(depth, capacity)


def test_the_clock_lives_in_the_root() -> None:
    trie = NgramTrie(DEPTH, 1_000)
    trie.insert(ids([5] * 10))
    assert int(trie.rows[ROOT, SEEN]) == trie.tokens == 10


@pytest.mark.parametrize("half_life_log2", [0, 3, 20, 30])
def test_the_clock_is_set_back_before_it_overflows(half_life_log2: int) -> None:
    """It ran over after 2**31 tokens, and the snapshot with it was refused."""
    trie = NgramTrie(DEPTH, 1000, half_life_log2)
    trie.insert(ids([1, 2, 3]), weight=1 << 20)
    trie.rows[ROOT, SEEN] = MAX_CLOCK - 2
    trie.insert(ids([1, 2, 5, 6]), weight=1 << 10)
    assert trie.tokens > MAX_CLOCK
    nodes = [[1, 2], [1, 2, 3], [2, 5], [6]]
    before = [count(trie, window) for window in nodes]
    trie._set_clock_back()
    assert 0 < trie.tokens <= 2 + MAX_CLOCK - (1 << half_life_log2) and trie.tokens < 1.6 * 2**30
    assert [count(trie, window) for window in nodes] == before
    check_integrity(trie)


def test_tokens_past_what_the_clock_holds_are_learnt_and_restored() -> None:
    trie = NgramTrie(DEPTH, 1000)
    trie.insert(ids([1, 2, 3]))
    trie.rows[ROOT, SEEN] = MAX_CLOCK
    for _ in range(100):
        trie.insert(ids([1, 2, 4] * 40), weight=16)
    assert 0 < trie.tokens < MAX_CLOCK
    check_integrity(trie)
    again = NgramTrie.restored(trie.rows[: trie.used].copy(), DEPTH, 1000, 20)
    assert count(again, [1, 2, 4]) == count(trie, [1, 2, 4]) > 0
