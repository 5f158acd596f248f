"""Pages are handed out once, come back once, and the cache can prove it."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from target_service.core.kv_cache import KVCache, WindowedLayers
from tree_kernels.pages import OutOfPages


def cache_of(num_pages: int = 8, page_size: int = 4) -> KVCache:
    return KVCache(num_pages, page_size, [(3, 5, 7)] * 2, torch.float32, torch.device("cpu"))


def test_pools_have_their_shapes_and_begin_finite() -> None:
    cache = cache_of()
    assert [tuple(keys.shape) for keys in cache.keys] == [(8, 4, 3, 5)] * 2
    assert [tuple(values.shape) for values in cache.values] == [(8, 4, 3, 7)] * 2
    assert all(bool((pool == 0).all()) for pool in (*cache.keys, *cache.values))


def test_a_cache_takes_memory_only_where_it_is_written() -> None:
    before = psutil.Process().memory_info().rss
    cache = KVCache(1024, 16, [(8, 64, 64)] * 4, torch.bfloat16, torch.device("cpu"))
    assert sum(pool.nbytes for pool in (*cache.keys, *cache.values)) == 128 << 20
    assert psutil.Process().memory_info().rss - before < 32 << 20
    cache.keys[0][3] = 1.5
    assert float(cache.keys[0].sum()) == 1.5 * 16 * 8 * 64


@pytest.mark.parametrize(("pages", "size"), [(0, 1), (1, 0)], ids=["no pages", "no size"])
def test_an_empty_cache_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        cache_of(pages, size)


def test_asking_for_too_many_takes_none() -> None:
    cache = cache_of()
    held = cache.allocate(5)
    with pytest.raises(OutOfPages):
        cache.allocate(4)
    assert (cache.free_pages, cache.used_pages) == (3, 5)
    cache.release(held)
    assert (cache.free_pages, cache.used_pages) == (8, 0)


def test_fresh_pages_are_consecutive_so_that_attention_reads_a_view() -> None:
    cache = cache_of()
    assert cache.allocate(3) == [0, 1, 2]
    assert cache.allocate(0) == cache.allocate(0, after=2) == []
    assert cache.allocate(4) == [3, 4, 5, 6]


def test_an_arrival_leaves_room_for_itself_and_its_neighbour() -> None:
    cache = cache_of(num_pages=20)
    first, second = cache.allocate(2), cache.allocate(2)
    assert (first, second) == ([0, 1], [10, 11])
    for _ in range(8):
        first += cache.allocate(1, after=first[-1])
        second += cache.allocate(1, after=second[-1])
    assert (first, second) == (list(range(10)), list(range(10, 20)))
    cache.check_integrity([first, second])


def test_a_sequence_grows_where_it_is_and_goes_on_in_the_longest_run() -> None:
    cache = cache_of(num_pages=12)
    held = cache.allocate(12)
    for free in ([3, 4], [7], [9, 10, 11]):
        cache.release(free)
    assert cache.allocate(4, after=2) == [3, 4, 9, 10]
    assert cache.allocate(2, after=11) == [7, 11]
    cache.check_integrity([held])


def test_pages_given_back_in_any_order_make_one_run_again() -> None:
    cache = cache_of(num_pages=9)
    pages = cache.allocate(9)
    random.Random(3).shuffle(pages)
    cache.release(pages[:4])
    cache.release(pages[4:])
    assert cache.allocate(9) == list(range(9))


def test_growing_sequences_stay_consecutive_while_there_is_room() -> None:
    chance, cache = random.Random(7), cache_of(num_pages=512, page_size=1)
    held: list[list[int]] = []
    for _ in range(2000):
        if len(held) < 8:
            held.append(cache.allocate(chance.randint(1, 10)))
        pages = chance.choice(held)
        pages += cache.allocate(chance.randint(1, 4), after=pages[-1])
        trimmed = chance.randint(0, 1)
        cache.release(pages[len(pages) - trimmed :])
        del pages[len(pages) - trimmed :]
        cache.check_integrity(held)
        assert all(pages == list(range(pages[0], pages[0] + len(pages))) for pages in held)
        if len(pages) > 25:
            cache.release(pages)
            held.remove(pages)


def test_pages_released_come_back_in_their_order() -> None:
    cache = cache_of()
    pages = cache.allocate(4)
    cache.release(pages)
    assert cache.allocate(4) == pages


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)], ids=["none", "one", "a full page", "one more"]
)
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert cache_of().pages_for(tokens) == pages


def test_slots_cross_pages_in_the_sequences_own_order() -> None:
    assert cache_of().slots([6, 2], 2, 4) == [26, 27, 8, 9]
    assert cache_of().slots([6, 2], 8, 0) == []
    # Of a prompt, from the beginning, the middle and the end of a page on.
    pages = [6, 2, 3, 9]
    for start in (0, 1, 3, 4):
        for count in range(4, 17 - start):
            slots = [4 * pages[token // 4] + token % 4 for token in range(start, start + count)]
            assert cache_of().slots(pages, start, count) == slots


def test_any_order_of_taking_and_giving_back_keeps_the_books() -> None:
    chance, cache = random.Random(5), cache_of(num_pages=13)
    held: list[list[int]] = []
    for _ in range(300):
        if held and chance.random() < 0.5:
            cache.release(held.pop(chance.randrange(len(held))))
        elif cache.free_pages:
            after = chance.choice(held)[-1:] if held else []
            held.append(cache.allocate(chance.randint(0, cache.free_pages), *after))
        cache.check_integrity(held)


def test_a_lost_page_and_a_page_held_twice_are_noticed() -> None:
    cache = cache_of()
    pages = cache.allocate(3)
    with pytest.raises(AssertionError, match="other owners"):
        cache.check_integrity([pages[:2]])
    with pytest.raises(AssertionError, match="other owners"):
        cache.check_integrity([pages, pages[:1]])
    with pytest.raises(AssertionError, match="twice"):
        cache.check_integrity([[*pages, pages[0]]])


@pytest.mark.parametrize("page", [2, 3, 7], ids=["a run's first", "a run's middle", "a run's last"])
def test_a_page_given_back_twice_is_noticed(page: int) -> None:
    cache = cache_of()
    pages = cache.allocate(3)
    cache.release(pages[2:])
    with pytest.raises(AssertionError, match="no owner"):
        cache.release([page])


def test_layers_of_other_shapes_have_pools_of_their_own() -> None:
    """And of those with a window slots are of frames."""
    shapes = [(3, 5, 7), (1, 4, 4), (3, 5, 7), (1, 4, 4), (1, 4, 4)]
    windowed = WindowedLayers((0, 1), window=4, share=0.5)
    cache = KVCache(8, 4, shapes, torch.float32, torch.device("cpu"), windowed=windowed)
    for layer, (heads, key_width, value_width) in enumerate(shapes):
        pages = 8 if layer > 1 else windowed.frames(8, 4) + 1
        assert cache.keys[layer].shape == (pages, 4, heads, key_width)
        assert cache.values[layer].shape == (pages, 4, heads, value_width)
    assert [len(keys) for keys, _ in cache.pools] == [1, 2, 1, 1]
    assert cache.frames is not None
    slots = torch.tensor([9, 30])
    within = cache.frames.slots(slots)
    assert [one.tolist() for one in cache.slots_of(slots)] == [[9, 30]] * 2 + [within.tolist()] * 2
    assert cache.token_bytes == 4 * (36 + 2 * 8 + (36 + 8) // 2)
    assert [keys.shape[1] for keys, _ in cache.like(16).pools][:2] == [16, 16]
