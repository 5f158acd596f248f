"""Which pages of the tree of prefixes have states of layers with states behind them, and which text is about to get
one. Sequences that begin alike go on from there."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tree_kernels.prefix_tree import PrefixNode
from tree_kernels.recurrence.states import RecurrentStates, SlotLength


@dataclass(slots=True)
class _KeptState:
    """A slot with the state behind a page."""

    slot: int
    # Where the host has not seen it yet: whether there is such a state hangs on the passes before.
    length: SlotLength | None = None


@dataclass(slots=True)
class _Marks:
    """Where one sequence's states are kept, in tokens that they are behind."""

    # By tokens, whether another sequence has the same text up to there.
    wanted: dict[int, bool] = field(default_factory=dict)
    # Slots of those that are copied already, likewise: their pages are not in the tree yet.
    copied: dict[int, tuple[int, bool]] = field(default_factory=dict)
    # Its second slot, 0 where it has none, and the tokens that its state was of when it got it.
    second: int = 0
    begins: int = 0


class KeptStates:
    """States behind pages of the tree of prefixes, each in a slot of its own.

    A state cannot be cut back to fewer tokens, so it is copied when its sequence is there: where texts part, which is
    known once the second of them comes, and at the end of what the operator lists and of long prompts. Where an answer
    ends is not known before. So a sequence has one of the slots while it generates, in which its passes leave the last
    page end that its state has gone past, and it stays there when the sequence gives its pages back. Up to half of the
    slots are given so, the others hold what earlier sequences left.

    The least recently used is replaced; of those that several sequences have, half of the slots are safe from those
    that one alone has.
    """

    def __init__(self, states: RecurrentStates) -> None:
        self._states = states
        self._free = list(states.kept_slots)
        # The least recently used first: those that one sequence alone has, and up to half of the slots that several do.
        self._unused: OrderedDict[PrefixNode, _KeptState] = OrderedDict()
        self._used: OrderedDict[PrefixNode, _KeptState] = OrderedDict()
        self._marks: dict[int, _Marks] = {}
        self._pairs = 0  # sequences with a second slot

    def __len__(self) -> int:
        """States behind pages."""
        return len(self._unused) + len(self._used)

    def usable(self, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """As many of a text's first nodes as have a state behind the last of them."""
        count = len(nodes)
        while count and not self._has(nodes[count - 1], count * self._states.page_size):
            count -= 1
        return nodes[:count]

    def restore(self, node: PrefixNode, slot: int) -> None:
        """Copy the state behind a page, which is used now, into a sequence's slot."""
        kept = self._unused.pop(node, None) or self._used.pop(node)
        self._states.copy_slot(kept.slot, slot)
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
        assert not marks.second, "a sequence that generates has read all that is known of its text"
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
        if self._has(node, tokens):
            self._free.append(slot)
        elif shared:
            self._keep_used(node, _KeptState(slot))
        else:
            self._unused[node] = _KeptState(slot)

    def follow(self, sequence: int, slot: int, tokens: int) -> None:
        """Have a sequence, whose state in its slot is of so many tokens or more behind the pass that was launched last,
        leave the page ends that it goes past from now on, if a slot can be given for that and it has none."""
        # Asked for every sequence of every step.
        if (marks := self._marks.get(sequence)) is not None and marks.second:
            return
        if 2 * self._pairs >= len(self._states.kept_slots) or not (self._free or self._unused):
            return
        second = self._free_slot()
        assert second is not None, "one is free or unused"
        self._states.pair_slots(slot, second)
        marks = self._marks.setdefault(sequence, _Marks())
        marks.second, marks.begins = second, tokens
        self._pairs += 1

    def forget_sequence(self, sequence: int, slot: int, node: PrefixNode | None, tokens: int) -> None:
        """A sequence gives its slot and its pages back. The last of them that is in the tree is `node`, which ends
        behind so many tokens: its state is kept if it is in the sequence's slots. None keeps nothing."""
        marks = self._marks.pop(sequence, None)
        if marks is None:
            return
        self._free += [copied for copied, _ in marks.copied.values()]
        if not marks.second:
            return
        self._pairs -= 1
        if node is not None and tokens >= marks.begins and not self._has(node, tokens):
            length = self._states.part_slots(slot, marks.second, tokens)
            self._unused[node] = _KeptState(marks.second, length)
        else:
            self._states.pair_slots(slot, slot)
            self._free.append(marks.second)

    def forget_page(self, node: PrefixNode) -> None:
        """The page leaves the tree, and the state behind it goes."""
        for states in (self._unused, self._used):
            kept = states.pop(node, None)
            if kept is not None:
                self._free.append(kept.slot)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free, holds one state, or is one sequence's second."""
        marks = self._marks.values()
        given = [one.second for one in marks if one.second]
        copied = [slot for one in marks for slot, _ in one.copied.values()]
        kept = [one.slot for one in (*self._unused.values(), *self._used.values())]
        assert sorted([*self._free, *kept, *copied, *given]) == list(self._states.kept_slots), (
            "a kept state's slot was lost or has two owners"
        )
        assert len(given) == self._pairs, "second slots were miscounted"

    def _has(self, node: PrefixNode, tokens: int) -> bool:
        """Whether there is a state behind a page, which ends behind so many tokens."""
        kept = self._unused.get(node) or self._used.get(node)
        if kept is None:
            return False
        length, kept.length = kept.length, None
        if length is not None and not 0 <= length.read() <= tokens:
            self.forget_page(node)
            return False
        return True

    def _keep_used(self, node: PrefixNode, kept: _KeptState) -> None:
        self._used[node] = kept
        if 2 * len(self._used) > max(2, len(self._states.kept_slots)):
            oldest, of_oldest = self._used.popitem(last=False)
            self._unused[oldest] = of_oldest

    def _free_slot(self) -> int | None:
        """A slot for one more state, perhaps the least recently used one's; None where all are being copied to or are
        given."""
        if self._free:
            return self._free.pop()
        states = self._unused or self._used
        return states.popitem(last=False)[1].slot if states else None
