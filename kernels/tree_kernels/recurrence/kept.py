"""Which pages of the tree of prefixes have states of layers with states behind them, and which text is about to get
one. Sequences that begin alike go on from there."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tree_kernels.prefix_tree import PrefixNode
from tree_kernels.recurrence.states import RecurrentStates


@dataclass(slots=True)
class _Marks:
    """Where one sequence's states are kept, in tokens that they are behind."""

    # By tokens, whether another sequence has the same text up to there.
    wanted: dict[int, bool] = field(default_factory=dict)
    # Slots of those that are copied already, likewise: their pages are not in the tree yet.
    copied: dict[int, tuple[int, bool]] = field(default_factory=dict)
    # The page of the latest state behind its output.
    latest: PrefixNode | None = None


class KeptStates:
    """Copies of sequences' states in slots of their own, each behind a page of the tree of prefixes.

    A state cannot be cut back to fewer tokens, so it is copied when its sequence is there: where texts part, which is
    known once the second of them comes, at the end of what the operator lists and of long prompts, and behind the last
    page of a sequence's output. The least recently used is replaced; of those that several sequences have, half of
    the slots are safe from those that one alone has.
    """

    def __init__(self, states: RecurrentStates) -> None:
        self._states = states
        self._free = list(states.kept_slots)
        # The least recently used first: those that one sequence alone has, and up to half of the slots that several do.
        self._unused: OrderedDict[PrefixNode, int] = OrderedDict()
        self._used: OrderedDict[PrefixNode, int] = OrderedDict()
        self._marks: dict[int, _Marks] = {}

    def __len__(self) -> int:
        """States behind pages."""
        return len(self._unused) + len(self._used)

    def usable(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """As many of the first nodes as have a state behind the last of them."""
        count = len(nodes)
        while count and nodes[count - 1] not in self._unused and nodes[count - 1] not in self._used:
            count -= 1
        return nodes[:count]

    def restore(self, node: PrefixNode, slot: int) -> None:
        """Copy the state behind a page, which is used now, into a sequence's slot."""
        kept = self._slot_of(node)
        self._states.copy_slot(kept, slot)
        self._keep_used(node, kept)

    def request_copy(self, sequence: int, tokens: int, *, shared: bool = True) -> None:
        """Keep the state of a sequence, by its id, behind its first `tokens`, once it has read so many and no more.
        `shared`: others have the same text up to there."""
        wanted = self._marks.setdefault(sequence, _Marks()).wanted
        wanted[tokens] = shared or wanted.get(tokens, False)

    def rows_until_copy(self, sequence: int, start: int, count: int) -> int:
        """Of `count` known tokens behind the first `start` as many as a sequence may read at once: up to where its
        state is wanted."""
        marks = self._marks.get(sequence)
        if marks is None:
            return count
        return min([count, *(tokens - start for tokens in marks.wanted if tokens > start)])

    def copy_if_requested(self, sequence: int, tokens: int, slot: int) -> None:
        """Copy a sequence's state from its slot if it is wanted behind so many tokens, with which the pass ends that
        was launched last."""
        marks = self._marks.get(sequence)
        if marks is None or tokens not in marks.wanted:
            return
        shared, kept = marks.wanted.pop(tokens), self._free_slot()
        if kept is not None:
            self._states.copy_slot(slot, kept)
            marks.copied[tokens] = kept, shared

    def attach(self, sequence: int, node: PrefixNode, tokens: int) -> None:
        """A sequence's page that ends behind so many tokens is in the tree now: a state that was copied there is behind
        it."""
        marks = self._marks.get(sequence)
        copied = None if marks is None else marks.copied.pop(tokens, None)
        if copied is None:
            return
        slot, shared = copied
        if self._has(node):
            self._free.append(slot)
        elif shared:
            self._keep_used(node, slot)
        else:
            self._unused[node] = slot

    def keep_latest(self, sequence: int, node: PrefixNode, slot: int) -> None:
        """Keep a sequence's state, of its slot, behind this page, in place of the one behind an earlier page. The state
        holds no token behind the page, and the slot the inputs of those up to it that the state lacks."""
        marks = self._marks.setdefault(sequence, _Marks())
        if self._has(node):
            return
        if marks.latest is not None and marks.latest in self._unused and len(marks.latest.children) < 2:
            self._free.append(self._unused.pop(marks.latest))
        kept = self._free_slot()
        if kept is not None:
            self._states.copy_slot(slot, kept)
            self._unused[node] = kept
            marks.latest = node

    def forget_sequence(self, sequence: int) -> None:
        """A sequence gives its pages back."""
        marks = self._marks.pop(sequence, None)
        if marks is not None:
            self._free += [slot for slot, _ in marks.copied.values()]

    def forget_page(self, node: PrefixNode) -> None:
        """The page leaves the tree, and the state behind it goes."""
        for kept in (self._unused, self._used):
            slot = kept.pop(node, None)
            if slot is not None:
                self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or holds one state."""
        copied = [slot for marks in self._marks.values() for slot, _ in marks.copied.values()]
        held = [*self._free, *self._unused.values(), *self._used.values(), *copied]
        assert sorted(held) == list(self._states.kept_slots), "a kept state's slot was lost or has two owners"

    def _has(self, node: PrefixNode) -> bool:
        return node in self._unused or node in self._used

    def _slot_of(self, node: PrefixNode) -> int:
        slot = self._unused.pop(node, None)
        return self._used.pop(node) if slot is None else slot

    def _keep_used(self, node: PrefixNode, slot: int) -> None:
        self._used[node] = slot
        if 2 * len(self._used) > max(2, len(self._states.kept_slots)):
            oldest, of_oldest = self._used.popitem(last=False)
            self._unused[oldest] = of_oldest

    def _free_slot(self) -> int | None:
        """A slot for one more state, perhaps the least recently used one's; None where all are being copied to."""
        if self._free:
            return self._free.pop()
        kept = self._unused or self._used
        return kept.popitem(last=False)[1] if kept else None
