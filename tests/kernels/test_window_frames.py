"""Frames of layers with a window by themselves: who needs which, what is taken first, and where slots lie."""

from __future__ import annotations

import random

import pytest
import torch

from tree_kernels.attention import AttentionBatch, AttentionVariant, TreeAttention
from tree_kernels.pages import OutOfPages
from tree_kernels.window_frames import WindowFrames


def test_any_order_of_sequences_keeps_the_books() -> None:
    """Sequences grow, leave their windows behind, end, and begin with pages of others; a cache keeps some."""
    chance, pages = random.Random(3), 60
    frames = WindowFrames(pages, 17, page_size=1, window=4, device=torch.device("cpu"))
    cached: set[int] = set()
    # Each: its pages, and the first of them whose frame it holds.
    held: list[tuple[list[int], list[int]]] = []
    refused = resumed = 0
    for _ in range(3000):
        action = chance.random()
        if action < 0.3 and len(held) < 5:
            start = sorted(page for page in cached if frames.has(page))[: chance.randrange(4)]
            resumed += bool(start)
            frames.hold(start)
            held.append(([*start], [0]))
        elif held and action < 0.7:
            own, _ = chance.choice(held)
            taken = {page for other, _ in held for page in other} | cached
            free = [page for page in range(pages) if page not in taken]
            new = free[: chance.randrange(1, 4)]
            try:
                frames.hold(new)
                own += new
            except OutOfPages:
                refused += 1
        elif held and action < 0.85:
            own, first = chance.choice(held)
            until = chance.randrange(first[0], len(own) + 1)
            cached |= {page for page in own if chance.random() < 0.5}
            frames.drop(own[first[0] : until], cached.__contains__)
            first[0] = until
        elif held:
            own, first = held.pop(chance.randrange(len(held)))
            frames.drop(own[first[0] :], cached.__contains__)
        if chance.random() < 0.2:
            needed = {page for own, _ in held for page in own}
            gone = [page for page in cached if page not in needed][:3]
            cached -= {*gone}
            frames.forget(gone)
        frames.check_integrity([own[first[0] :] for own, first in held], cached)
    assert refused > 10 and resumed > 10


def test_what_was_needed_least_recently_goes_first() -> None:
    frames = WindowFrames(8, 4, page_size=2, window=3, device=torch.device("cpu"))
    frames.hold([0, 1, 2, 3])
    frames.drop([2, 0, 3], lambda _: True)
    frames.hold([0])
    frames.hold([7])
    assert [frames.has(page) for page in (0, 1, 2, 3, 7)] == [True, True, False, True, True]
    with pytest.raises(OutOfPages, match="expected 2 free frames, have 1"):
        frames.hold([4, 5])
    assert frames.free_frames == 1 and frames.used_frames == 3


def test_a_page_of_the_same_text_takes_over_the_frame() -> None:
    frames = WindowFrames(6, 3, page_size=2, window=3, device=torch.device("cpu"))
    frames.hold([1])
    (frame,) = frames.frames_of([1])
    frames.hand_over(1, 4)
    assert frames.frames_of([4, 1]) == [frame, 0]
    # One that has a frame of its own keeps that.
    frames.hold([2])
    frames.hand_over(2, 4)
    frames.check_integrity([[4], [4]], ())
    assert frames.free_frames == 2


@pytest.mark.parametrize("position", range(12))
def test_a_row_sees_no_page_before_its_first(position: int) -> None:
    frames = WindowFrames(9, 9, page_size=3, window=4, device=torch.device("cpu"))
    seen = {key // 3 for key in range(position + 1) if key > position - 4}
    assert frames.first_page(position) == min(seen)


def test_slots_lie_where_their_pages_do() -> None:
    frames = WindowFrames(10, 6, page_size=4, window=5, device=torch.device("cpu"))
    frames.hold([9, 3])
    nine, three = frames.frames_of([9, 3])
    slots = torch.tensor([9 * 4 + 1, 3 * 4, -1, 3 * 4 + 3], dtype=torch.int32)
    assert frames.slots(slots).tolist() == [nine * 4 + 1, three * 4, -1, three * 4 + 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_table_is_sent_without_waiting_for_a_gpu() -> None:
    frames = WindowFrames(10, 6, page_size=4, window=5, device=torch.device("cuda"))
    frames.hold([9, 3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        frames.send()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert frames.table[[9, 3]].tolist() == list(frames.frames_of([9, 3]))


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_attention_over_frames_is_that_over_pages(backend: str) -> None:
    """With as many frames as the window needs, and nothing else in them."""
    generator = torch.Generator().manual_seed(1)
    size, window, parents = 4, 6, (0, 0, 1, 1)
    batch = AttentionBatch((0, 4, 5), (21, 9), ([0, 2, 3, 4, 5, 6, 7], [8, 9, 10]), size, (parents, None))
    keys, values = (torch.randn(11, size, 2, 8, generator=generator) for _ in range(2))
    query = torch.randn(5, 4, 8, generator=generator)
    frames = WindowFrames(11, 6, size, window, torch.device("cpu"))
    attention, variant = TreeAttention(backend), AttentionVariant(window)  # type: ignore[arg-type]
    expected = attention.run(attention.plan(batch), query, keys, values, 0.3, variant)
    within = [held[frames.first_page(prefix) :] for held, prefix in zip(batch.pages, batch.prefix_lengths, strict=True)]
    in_frames = [torch.zeros(7, size, 2, 8) for _ in range(2)]
    for pages in within:
        frames.hold(pages)
        for pool, cache in zip(in_frames, (keys, values), strict=True):
            pool[list(frames.frames_of(pages))] = cache[list(pages)]
    found = attention.run(attention.plan_in_frames(attention.plan(batch), frames), query, *in_frames, 0.3, variant)
    torch.testing.assert_close(found, expected)
