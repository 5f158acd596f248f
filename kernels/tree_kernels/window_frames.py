"""Where layers with a window keep the pages of texts: in frames, of which there are fewer than pages.

Such layers see the end of a text only. So a page is put into a frame when it is written, and leaves it once no row will
see it again, while layers without a window still read it. Page tables and slots stay those of pages; they are
translated where a layer with a window is computed, on a GPU inside its captured graph.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from tree_kernels.pages import OutOfPages


class WindowFrames:
    """Frames of pages, each with a count of the sequences that need it.

    A page that a cache of prefixes owns keeps its frame when no sequence needs it any more, as a *spare* one, until
    another page needs one: the one that was needed least recently goes first. Frame 0 is no page's, and is never
    written: what is masked may be read, and must be finite.
    """

    def __init__(self, num_pages: int, frames: int, page_size: int, window: int, device: torch.device) -> None:
        """`frames` for pages of texts; `window`: the longest of the layers', in tokens."""
        if not 1 <= frames <= num_pages or window < 1:
            raise ValueError(f"expected 1 to {num_pages} frames and a window, got {frames} and {window}")
        self.frames, self.window, self._page_size = frames, window, page_size
        # Passes that are laid out by hand, before any sequence is there, find distinct frames for the first pages.
        self._frame_of = np.arange(num_pages, dtype=np.int32) % frames + 1
        # On a CPU the same memory.
        self.table = torch.from_numpy(self._frame_of).to(device)
        self._changed: dict[int, None] | None = None if device.type == "cpu" else {}
        self._free = list(range(frames, 0, -1))
        self._held = array("I", bytes(4 * num_pages))
        self._backed = bytearray(num_pages)
        self._spare: OrderedDict[int, None] = OrderedDict()

    @property
    def free_frames(self) -> int:
        """Frames that `hold` can take, spare ones included."""
        return len(self._free) + len(self._spare)

    @property
    def used_frames(self) -> int:
        return self.frames - self.free_frames

    def first_page(self, position: int) -> int:
        """The first page of a text that a row at `position`, or behind it, sees."""
        return max(0, position - self.window + 1) // self._page_size

    def pages_within(self, tokens: int) -> int:
        """The most pages that hold what the rows of so many last tokens see."""
        return -(-(tokens + self.window) // self._page_size) + 1

    def has(self, page: int) -> bool:
        """Whether the page is in a frame."""
        return bool(self._backed[page])

    def hold(self, pages: Sequence[int]) -> None:
        """Need these pages, each once more, or raise `OutOfPages` and change nothing. A page without a frame gets one,
        whose keys and values are not its own yet."""
        spare = sum(page in self._spare for page in pages)
        missing = sum(not self._backed[page] for page in pages)
        if missing > self.free_frames - spare:
            raise OutOfPages(f"expected {missing} free frames, have {self.free_frames - spare}")
        for page in pages:
            self._spare.pop(page, None)
            self._held[page] += 1
        for page in pages:
            if not self._backed[page]:
                if not self._free:
                    self._empty(self._spare.popitem(last=False)[0])
                self._set(page, self._free.pop())
                self._backed[page] = 1

    def drop(self, pages: Iterable[int], is_cached: Callable[[int], bool]) -> None:
        """Need these pages once less. One that is not needed leaves its frame, unless it is cached."""
        for page in pages:
            assert self._held[page], f"page {page} has no holder of its frame"
            self._held[page] -= 1
            if not self._held[page]:
                if is_cached(page):
                    self._spare[page] = None
                else:
                    self._empty(page)

    def hand_over(self, source: int, target: int) -> None:
        """A sequence that holds page `source` holds `target` in its place, which has the same text. If that has no
        frame, it gets the one of `source`."""
        if not self._backed[target]:
            assert self._held[source] == 1, "page of a sequence alone"
            frame = int(self._frame_of[source])
            self._held[source], self._backed[source] = 0, 0
            self._set(source, 0)
            self._held[target], self._backed[target] = 1, 1
            self._set(target, frame)
        else:
            self.hold([target])
            self.drop([source], lambda _: False)

    def forget(self, pages: Iterable[int]) -> None:
        """These pages are free: none will be read."""
        for page in pages:
            if self._backed[page]:
                assert not self._held[page], f"a sequence needs the frame of page {page}"
                del self._spare[page]
                self._empty(page)

    def frames_of(self, pages: Sequence[int]) -> Sequence[int]:
        """The frame of each page; 0, or one of before the first sequence, for a page without."""
        found: Sequence[int] = self._frame_of[np.asarray(pages, dtype=np.int64)].tolist()
        return found

    def slots(self, slots: Tensor) -> Tensor:
        """Where layers with a window keep these slots [..] of pages; negative ones are nowhere."""
        pages = torch.div(slots, self._page_size, rounding_mode="floor").clamp(min=0)
        moved = self.table[pages.long()].to(slots.dtype) * self._page_size + slots % self._page_size
        return torch.where(slots < 0, slots, moved)

    def send(self) -> None:
        """Bring the device's table up to date, without waiting: before a pass is launched."""
        if self._changed:
            pages = np.fromiter(self._changed, np.int64, len(self._changed))
            changed = torch.from_numpy(np.stack([pages, self._frame_of[pages]]))
            # Pinned, or the copy would wait for the passes before this one.
            changed = changed.pin_memory().to(self.table.device, non_blocking=True)
            self.table.index_copy_(0, changed[0], changed[1].int())
            self._changed.clear()

    def check_integrity(self, needed: Collection[Iterable[int]], cached: Collection[int]) -> None:
        """Raise AssertionError unless every frame is free, or of one page, which is needed as often as is counted: once
        by each of `needed` that has it. Only cached pages may be in a frame that is not needed."""
        counted = {page: count for page, count in enumerate(self._held) if count}
        assert Counter(page for pages in needed for page in pages) == counted, "pages are needed by others than counted"
        backed = [page for page, flag in enumerate(self._backed) if flag]
        taken = [int(self._frame_of[page]) for page in backed]
        assert sorted([*taken, *self._free]) == list(range(1, self.frames + 1)), "a frame is neither free nor a page's"
        assert set(self._spare) == set(backed) - counted.keys(), "a page in a frame is neither needed nor spare"
        assert set(self._spare) <= set(cached), "a page that cannot be found has a frame"

    def _empty(self, page: int) -> None:
        self._free.append(int(self._frame_of[page]))
        self._backed[page] = 0
        self._set(page, 0)

    def _set(self, page: int, frame: int) -> None:
        self._frame_of[page] = frame
        if self._changed is not None:
            self._changed[page] = None
