"""Text that a form lets expect: what is forced behind a state of its grammar, and where few tokens may come each of
them. It is found once for each state of a form, and not again at every pass and by every output."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from target_service.grammars.row_masks import MOST_CHILDREN, list_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher

Ints = NDArray[np.int32]
Reals = NDArray[np.float64]
# Nodes that are looked for behind one state, and masks that are computed for it. Chosen: a pass seldom accepts more
# than ten tokens, and so many masks take about 2 ms.
_NODES, _MASKS = 64, 24
# Bytes of forced text by which a state is known, whatever came before: such as a name in JSON with its signs. Chosen.
_LANDMARK = 4
# States of a form whose text is kept. Chosen: a form of seven fields has some thirty.
_STATES = 512


class ExpectedNodes:
    """A tree of tokens that may follow a text, each with its parent among those before it, -1 for the text's last
    token, and its probability given its parent."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        # By parent and token.
        self._places: dict[tuple[int, int], int] = {}
        self._inner: set[int] = set()
        self._packed: tuple[Ints, Reals] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def copy(self) -> ExpectedNodes:
        """The same nodes, to which others can be added."""
        found = ExpectedNodes()
        found.token_ids, found.parents, found.scores = [*self.token_ids], [*self.parents], [*self.scores]
        found._places, found._inner = {**self._places}, {*self._inner}
        return found

    def child(self, parent: int, token: int) -> int:
        """The place of a node's child with this token; -1 where there is none."""
        return self._places.get((parent, token), -1)

    def has_children(self, node: int) -> bool:
        """Whether anything is expected behind a node."""
        return node in self._inner

    def add(self, parent: int, token: int, score: float) -> int:
        """Add a node. Returns its place."""
        place = self._places[parent, token] = len(self.token_ids)
        self.token_ids.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self._inner.add(parent)
        return place

    def add_below(self, parent: int, nodes: ExpectedNodes) -> None:
        """Add a tree whose root is a node of this one that has no children; -1 for the text's last token."""
        first, parents = len(self.token_ids), self.parents
        parents += [first + above if above >= 0 else parent for above in nodes.parents]
        self.token_ids += nodes.token_ids
        self.scores += nodes.scores
        added = parents[first:]
        self._places.update(zip(zip(added, nodes.token_ids, strict=True), itertools.count(first), strict=False))
        self._inner.update(added)

    def packed(self) -> tuple[Ints, Reals]:
        """[2, n] the token and the parent of each node, and [n] the probabilities: the same arrays at every call, so
        nothing may be added behind the first."""
        if self._packed is None:
            nodes = np.array([self.token_ids, self.parents], np.int32)
            self._packed = nodes, np.array(self.scores, np.float64)
        return self._packed


class Trail(NamedTuple):
    """The name of a state: hashes of what was chosen before it and of the text that was forced last, and its bytes."""

    chosen: int = 0
    forced: int = 0
    forced_bytes: int = 0


class ExpectedText:
    """What may follow the states of one form, kept for all outputs of it. Used by one thread.

    A grammar does not tell whether two of its states are the same. So a state is named by its `Trail`: the last forced
    text, such as the name of a field, and behind that the tokens that could come where few could, and which of them
    came if they were very few.
    Free text leaves no trail, so that outputs with other names in a field share what follows it. Where something else
    decides what follows, the wrong text may be expected: that costs rows of a pass, and is never generated, since rows
    are masked by the grammar itself.
    """

    def __init__(self, texts: Sequence[bytes], ends: frozenset[int]) -> None:
        """`texts` are the bytes of every token; behind the tokens `ends` nothing follows."""
        self._texts, self._ends = texts, ends
        # By the tokens that may come.
        self._chances: dict[tuple[int, ...], dict[int, float]] = {}
        # By trail, the one that was used last at the end.
        self._found: OrderedDict[int, ExpectedNodes] = OrderedDict()

    def few(self, words: Ints) -> tuple[int, ...]:
        """The tokens that a mask [words] allows; none where they are many."""
        listed = np.empty(MOST_CHILDREN, np.int32)
        count = list_tokens(words, listed)
        return () if count > MOST_CHILDREN else tuple(listed[:count].tolist())

    def trail_behind(self, trail: Trail, few: tuple[int, ...], token: int) -> Trail:
        """The trail behind a token at a state where these few may come; none where many may."""
        if len(few) == 1:
            count = trail.forced_bytes + len(self._texts[token])
            return Trail(0 if count >= _LANDMARK else trail.chosen, hash((trail.forced, token)), count)
        chosen = trail.forced if trail.forced_bytes >= _LANDMARK else trail.chosen
        if not few:
            return Trail(chosen)
        # Of more tokens, such as digits, each would be a state of its own, whose text is looked for again, and what
        # follows seldom depends on them. Chosen.
        return Trail(hash((chosen, few, token if len(few) <= 8 else -1)))

    def behind(
        self, trail: Trail, few: tuple[int, ...], matcher: Callable[[], LLMatcher], path: Sequence[int], masks: int
    ) -> tuple[ExpectedNodes | None, int]:
        """What may follow a state of this `trail`, in which these `few` tokens may come: behind a `path` of tokens that
        a matcher has not read, which is not changed. None where that is not known and no `masks` may be computed for
        it, or where many tokens may come; and how many masks may then be. The nodes are shared."""
        if not few:
            return None, masks
        key = hash((trail, few))
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        elif masks > 0:
            found, taken = self._search(few, matcher(), path)
            masks -= taken
            self._found[key] = found
            if len(self._found) > _STATES:
                self._found.popitem(last=False)
        return found, masks

    def _search(self, few: tuple[int, ...], matcher: LLMatcher, path: Sequence[int]) -> tuple[ExpectedNodes, int]:
        """The nodes behind a path, by falling probability, and the masks that were computed for them."""
        found, taken = ExpectedNodes(), 0
        matcher = matcher.deep_copy()
        if not matcher.consume_tokens(list(path)):
            return found, taken
        # With numbers, so that nothing else is compared.
        places, number = [(-1.0, 0, _Place(matcher, (), -1, few))], 0
        while places and len(found) < _NODES and taken < _MASKS:
            negative, _, place = heapq.heappop(places)
            if place.few is None:
                place, taken = self._forced(place, found), taken + 1
            for token, chance in self._children(place.few or ()).items():
                child = found.add(place.node, token, chance)
                # A path ends where it is less probable. Chosen.
                if -negative * chance >= 1 / 64:
                    number += 1
                    heapq.heappush(places, (negative * chance, number, _Place(place.matcher, (token,), child)))
        return found, taken

    def _forced(self, place: _Place, found: ExpectedNodes) -> _Place:
        """The place behind the text that is forced at another one, whose tokens are added."""
        matcher, node = place.matcher.deep_copy(), place.node
        if not matcher.consume_tokens(list(place.unread)):
            return place
        forced = matcher.compute_ff_tokens()
        if self._ends.intersection(forced) or not matcher.consume_tokens(forced):
            return place
        for token in forced:
            node = found.add(node, token, 1.0)
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)
        return _Place(matcher, (), node, () if matcher.is_error() else self.few(words))

    def _children(self, few: tuple[int, ...]) -> dict[int, float]:
        """How probable each of these tokens is, without those that end the output. Of tokens with which others begin
        the longest are the usual ones."""
        if few not in self._chances:
            if len(self._chances) >= _STATES:
                self._chances.clear()
            texts = [self._texts[token] for token in few]
            # A token with which another one begins, beside 1 for others. Chosen.
            weights = {
                token: 0.1 if any(other != own and other.startswith(own) for other in texts) else 1.0
                for token, own in zip(few, texts, strict=True)
                if token not in self._ends
            }
            whole = sum(weights.values())
            self._chances[few] = {token: weight / whole for token, weight in weights.items()}
        return self._chances[few]


class _Place(NamedTuple):
    """Where text is expected: behind tokens that a matcher has not read yet."""

    matcher: LLMatcher
    unread: tuple[int, ...]
    node: int  # the last of them; -1 for the root
    few: tuple[int, ...] | None = None  # the tokens that may come, none where they are many; None if not known yet
