"""One output's grammar: which tokens may come after each row of a tree, and which must."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.grammars.row_masks import (
    MOST_CHILDREN,
    MaskedRows,
    ReachedRows,
    TreeRows,
    compute_masks,
    find_reached,
    list_tokens,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from target_service.grammars.vocabulary import TokenWords

_WORD = 32
# A path of expected text ends where it is less probable. Chosen.
_LEAST_CHANCE = 1 / 64
# Of a token with which another one that may come begins, beside 1 for others. Chosen.
_CHANCE_OF_PREFIX = 0.1
# Of a processor, for the masks of one tree, beside what those of a usual form take: at the beginning of a string with a
# bounded length 0.1 to 0.3 ms each, of 49,152 tokens. Chosen: half of what a pass takes.
_SLOW_SECONDS, _USUAL_SECONDS = 4e-3, 2.5e-4
# Forced tokens behind which no more is looked for, with the last mask. Chosen: a pass seldom accepts more.
_ENOUGH_FORCED = 4
# The probability of a row that somebody else drafted, as long as nothing is known of it. Chosen.
_OTHERS_CHANCE = 0.5


@dataclass(frozen=True)
class ConstrainedTree(TokenTree):
    """A tree without the rows that a grammar forbids, and with rows that it forces: tokens which alone may come."""

    forced: int = 0  # how many rows those are


class TreeMasks(NamedTuple):
    """Which tokens may follow each row: bit `token % 32` of `found[places[row], token // 32]`. With an `error` they
    took more work than is allowed, and the output cannot go on."""

    found: NDArray[np.int32]  # [masks, words], also of other trees; that of place 0 allows the end tokens alone
    places: NDArray[np.int32]  # [rows]
    error: InvalidField | None = None

    @property
    def words(self) -> NDArray[np.int32]:
        """[rows, words] the masks themselves."""
        return self.found[self.places]


class ExpectedNodes(NamedTuple):
    """A tree of tokens that may follow the output: the parent of each node among those before it, -1 for the output's
    last token, and its probability given its parent."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]


class FollowedGrammar:
    """The state of a grammar after the tokens of one output: they alone decide it."""

    def __init__(
        self,
        matcher: LLMatcher,
        form: StructuredOutput,
        vocabulary_size: int,
        end_token_ids: Sequence[int],
        tokens: TokenWords,
    ) -> None:
        """`matcher` is at its beginning, and nothing else uses it; `tokens` are those of the model. Symbols: V is the
        vocabulary size."""
        self._matcher = matcher
        self._tokens_of, self._texts = tokens.marked, tokens.tokens
        self._form = form
        # Tokens of the output that the matcher has read.
        self._length = 0
        self.words = -(-vocabulary_size // _WORD)
        self._ends = frozenset(end_token_ids)
        bits = np.zeros(self.words * _WORD, bool)
        bits[list(end_token_ids)] = True
        # The tree that `constrained` made last, and its masks.
        self._kept: tuple[TokenTree, TreeMasks] | None = None
        # Whether the masks of one tree took so long that it has no drafted rows from then on, and its sequence sits out
        # of passes until they are there.
        self.slow = False
        # The rows that were followed last, and their masks.
        self._followed: tuple[TreeRows, ReachedRows, NDArray[np.int32]] | None = None
        # By the tokens that may come, see `_children`.
        self._chances: dict[tuple[int, ...], dict[int, float]] = {}
        # [words] int32: the end alone. For rows that no walk reaches, whose logits need some distribution.
        self._end_alone = np.packbits(bits, bitorder="little").view(np.int32)

    def begin_behind(self, output: Sequence[int], text: bytes) -> None:
        """Begin behind an output, which has the form's first `text` at its end. Once, before anything else."""
        self._matcher.consume_tokens(self._tokens_of(text))
        self._length = len(output)

    def constrained(self, tree: TokenTree, output: Sequence[int], most: int) -> TokenTree:
        """A tree of up to `most` rows below its root, made of one that has no more: without the rows that the grammar
        forbids, and with those that it forces where the tree ends. Its masks are kept for the next call of `masks`.
        Takes what `masks` does, and no draft distributions, which a row that is left out would make wrong."""
        rows = self._follow(tree, output, most)
        if rows is None:
            self._kept = tree, self._complexity(len(tree))
            return tree
        token_ids, sources, parents, words = zip(*rows, strict=True)
        scores = tuple([1.0 if source < 0 else tree.scores[source] for source in sources])
        found = ConstrainedTree(token_ids, parents, scores, forced=sources.count(-1))
        self._kept = found, TreeMasks(np.stack((self._end_alone, *words)), np.arange(1, 1 + len(rows), dtype=np.int32))
        return found

    def masks(self, tree: TokenTree, output: Sequence[int]) -> TreeMasks:
        """The masks of a tree's rows, whose root is the last token of `output`, or of the prompt where that is empty.
        Each output must continue the one of the last call."""
        followed = self.follow(tree, output)
        (masks,), _ = masks_of([followed], np.empty((1 + len(tree), self.words), np.int32))
        return masks

    def follow(self, tree: TokenTree | TreeRows, output: Sequence[int]) -> FollowedTree:
        """What `masks_of` computes masks of, together with those of other outputs: the rows of a tree, also as a device
        laid them out."""
        if self._kept is not None and self._keeps(tree, output):
            return FollowedTree(self, None, self._kept[1])
        self._read(output)
        return FollowedTree(self, MaskedRows.of(self._matcher, TreeRows(tree.token_ids, tree.parents)))

    def has_masks(self, tree: TokenTree, output: Sequence[int]) -> bool:
        """Whether the masks of a tree are kept, or were computed for a step that is still under way."""
        return self._keeps(tree, output) or (self._followed is not None and self._length == len(output))

    def compute_ahead(self, tree: TokenTree, output: Sequence[int]) -> None:
        """Compute the masks of a tree and keep them for the step that has it. In any thread; nothing else may use the
        grammar meanwhile."""
        masks = self.masks(tree, output)
        self._kept = tree, masks

    def _keeps(self, tree: TokenTree | TreeRows, output: Sequence[int]) -> bool:
        if self._kept is None or self._length != len(output):
            return False
        # Roots alone are all the same.
        return self._kept[0] is tree or len(self._kept[0].token_ids) == len(tree.token_ids) == 1

    def _read(self, output: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(output[self._length :]))
        self._length, self._kept, self._followed = len(output), None, None

    def _masked(
        self, masked: MaskedRows, reached: ReachedRows, room: NDArray[np.int32], free: int
    ) -> tuple[TreeMasks, int]:
        """The masks of a tree's rows, given those that were computed in `room`, and its first place that is then free;
        `free` is the first one now."""
        tree = masked.tree
        self.slow |= masked.seconds > _SLOW_SECONDS + _USUAL_SECONDS * len(tree.token_ids)
        while len(lacking := np.flatnonzero(reached.words == 0)):
            # Nothing is computed where a grammar ends, nor behind that.
            row = int(lacking[0])
            words = self._words_behind(_path_to(tree, row))
            if words is None:
                return self._complexity(len(tree.token_ids)), free
            if not reached.places[row]:
                reached.places[row], free = free, free + 1
            room[reached.places[row]] = words
            parents = np.array([-1, *tree.parents[1:]], np.int32)
            find_reached(np.array(tree.token_ids, np.int32), parents, room, *reached)
        if any([reached.words[chain.rows[0]] >= 0 and chain.matcher.is_error() for chain in masked.chains]):
            return self._complexity(len(tree.token_ids)), free
        self._followed = tree, reached, room
        return TreeMasks(room, reached.places), free

    def _words_behind(self, path: Sequence[int]) -> NDArray[np.int32] | None:
        """The mask behind tokens that follow the output; None where there is none."""
        matcher = self._matcher.deep_copy()
        return self._words_of(matcher) if matcher.consume_tokens(list(path)) else None

    def expected(self, most: int, masks: int) -> ExpectedNodes:
        """About `most` tokens that are likely to follow the output of the last call of `masks`: text that is forced,
        and where few tokens may come each of them, behind the output and behind rows of its tree. Takes up to `masks`
        masks besides."""
        found, places, seen = ExpectedNodes([], [], []), list[tuple[float, int, _Place]](), set[tuple[int, ...]]()
        self._add_rows(found, places)
        # By falling probability, with numbers so that nothing else is compared.
        heapq.heapify(places)
        number = len(places)
        while places and len(found.token_ids) < most and masks > 0:
            negative, _, place = heapq.heappop(places)
            if place.path in seen:
                continue
            seen.add(place.path)
            words, path, node, matcher, consumed = place.words, place.path, place.node, place.matcher, place.consumed
            if words is None:
                masks -= 1
                matcher = matcher.deep_copy()
                if not matcher.consume_tokens(list(path[consumed:])):
                    continue
                forced = matcher.compute_ff_tokens()
                if self._ends.intersection(forced) or not matcher.consume_tokens(forced):
                    continue
                for token in forced:
                    path, node = (*path, token), _add(found, node, token, 1.0)
                    seen.add(path)
                # Behind a text the last mask would often be that of a free string, which takes longest.
                words = self._words_of(matcher) if masks or len(forced) < _ENOUGH_FORCED else None
                consumed = len(path)
            for token, chance in ({} if words is None else self._children(words)).items():
                child = _add(found, node, token, chance)
                if -negative * chance >= _LEAST_CHANCE:
                    number += 1
                    behind = _Place(matcher, consumed, (*path, token), child)
                    heapq.heappush(places, (negative * chance, number, behind))
        return found

    def _add_rows(self, found: ExpectedNodes, places: list[tuple[float, int, _Place]]) -> None:
        """Add the rows that were followed last and behind which few tokens may come, to be looked behind."""
        if self._followed is None:
            return
        tree, reached, room = self._followed
        # Where many tokens may come, more words than these have some.
        few = ((reached.words > 0) & (reached.words <= MOST_CHILDREN)).tolist()
        if not any(few):
            return
        wanted = [*few]
        for row in range(len(few) - 1, 0, -1):
            wanted[tree.parents[row]] |= wanted[row]
        paths: list[tuple[int, ...]] = [()] * len(few)
        nodes = [-1] * len(few)
        for row, token in enumerate(tree.token_ids):
            if not wanted[row]:
                continue
            if row:
                parent = tree.parents[row]
                paths[row], nodes[row] = (*paths[parent], token), _add(found, nodes[parent], token, _OTHERS_CHANCE)
            if few[row]:
                place = _Place(self._matcher, 0, paths[row], nodes[row], room[reached.places[row]])
                places.append((-(_OTHERS_CHANCE ** len(paths[row])), len(places), place))

    def _children(self, words: NDArray[np.int32]) -> dict[int, float]:
        """The tokens that a mask allows, and how probable each is, without those that end the output; none where they
        are many. Of tokens with which others begin the longest are the usual ones."""
        listed = np.empty(MOST_CHILDREN, np.int32)
        count = list_tokens(words, listed)
        if count > MOST_CHILDREN:
            return {}
        tokens = listed[:count].tolist()
        key = tuple(tokens)
        if key not in self._chances:
            texts = [self._texts[token] for token in tokens]
            weights = {
                token: _CHANCE_OF_PREFIX if any(other != own and other.startswith(own) for other in texts) else 1.0
                for token, own in zip(tokens, texts, strict=True)
                if token not in self._ends
            }
            whole = sum(weights.values())
            self._chances[key] = {token: weight / whole for token, weight in weights.items()}
        return self._chances[key]

    def _complexity(self, rows: int) -> TreeMasks:
        problem = "is too complex: a token of this output takes more work than is allowed"
        error = InvalidField(f"sampling.structured_output.{self._form.form}", problem)
        return TreeMasks(self._end_alone[None], np.zeros(rows, np.int32), error)

    def _follow(self, tree: TokenTree, output: Sequence[int], most: int) -> list[_FollowedRow] | None:
        """The rows that the grammar allows, depth first, with forced ones below those that end the tree, up to `most`
        below the root in all. Leads the matcher back to the root. None where it has met a limit."""
        self._read(output)
        children: dict[int, list[int]] = defaultdict(list)
        for row, parent in enumerate(tree.parents[1:], start=1):
            children[parent].append(row)
        words = self._words_here()
        if words is None:
            return None
        rows = [_FollowedRow(tree.token_ids[0], 0, 0, words)]
        # Rows of the path, each with what is still to come below it. Not by recursion: a tree may be a chain of a
        # thousand rows.
        path = [(0, self._below(tree, children[0], words, most))]
        while path:
            above, below = path[-1]
            # A tree without forced rows has room for its own.
            room = len(rows) <= max(most, len(tree) - 1)
            token, source = next(below, (-1, -1)) if room else (-1, -1)
            if token < 0:
                path.pop()
                if path and not self._matcher.rollback(1):
                    return None
                continue
            self._matcher.consume_token(token)
            words = self._words_here()
            if words is None:
                return None
            path.append((len(rows), self._below(tree, children[source] if source >= 0 else [], words, most)))
            rows.append(_FollowedRow(token, source, above, words))
        return rows

    def _below(
        self, tree: TokenTree, children: Sequence[int], words: NDArray[np.int32], most: int
    ) -> Iterator[tuple[int, int]]:
        """(token, row of the tree, -1 for none) of what may follow a row with these children: those of them that are
        allowed, or the one token that is."""
        allowed = [child for child in children if self._goes_on(words, tree.token_ids[child])]
        if allowed or not most:
            return iter([(tree.token_ids[child], child) for child in allowed])
        token = _only_token(words)
        return iter([] if token is None or token in self._ends else [(token, -1)])

    def _words_here(self) -> NDArray[np.int32] | None:
        """[words] the mask of the row that the matcher has come to; None where there is none."""
        return self._words_of(self._matcher)

    def _words_of(self, matcher: LLMatcher) -> NDArray[np.int32] | None:
        # There may be a word more than the vocabulary has.
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: self.words]
        return None if matcher.is_error() or not words.any() else words

    def _goes_on(self, mask: NDArray[np.int32], token: int) -> bool:
        """Whether a mask allows a token, and there is something behind it."""
        return bool(mask[token // _WORD] >> (token % _WORD) & 1) and token not in self._ends


class _Place(NamedTuple):
    """Where text is expected: behind a path from the root, of which a grammar has read the first tokens."""

    matcher: LLMatcher
    consumed: int
    path: tuple[int, ...]
    node: int  # the path's end among the nodes; -1 for the root
    words: NDArray[np.int32] | None = None  # the mask there; None where it is not known yet


class _FollowedRow(NamedTuple):
    token: int
    source: int  # the row of the tree that was followed; -1 for one that was forced
    parent: int
    words: NDArray[np.int32]  # what may come next


@dataclass(frozen=True, slots=True, eq=False)
class FollowedTree:
    """A tree of one output, of which `masks_of` computes the masks."""

    grammar: FollowedGrammar
    rows: MaskedRows | None
    kept: TreeMasks | None = None  # where they are known


def masks_of(
    trees: Sequence[FollowedTree], room: NDArray[np.int32], *, timed: bool = False
) -> tuple[list[TreeMasks], int]:
    """The masks of each tree, of outputs of one model; of each output the last tree that was followed. They are written
    to `room` [1 + rows, words], and how many of its places have one is returned too. `timed` finds the grammars that
    are `slow`, also of so many rows that threads would compute them at once."""
    if not trees:
        return [], 0
    room[0] = trees[0].grammar._end_alone
    computed = [tree.rows for tree in trees if tree.rows is not None]
    reached, free = compute_masks(computed, room, timed=timed)
    masks, first = list[TreeMasks](), 0
    for tree in trees:
        if tree.rows is None:
            assert tree.kept is not None, "they are known"
            count = len(tree.kept.places)
            room[free : free + count] = tree.kept.words
            masks.append(TreeMasks(room, np.arange(free, free + count, dtype=np.int32), tree.kept.error))
            free += count
        else:
            end = first + len(tree.rows.tree.token_ids)
            own = ReachedRows(reached.places[first:end], reached.words[first:end])
            made, free = tree.grammar._masked(tree.rows, own, room, free)
            masks.append(made._replace(found=room))
            first = end
    return masks, free


def _path_to(tree: TreeRows, row: int) -> list[int]:
    """The tokens from below the root to a row."""
    path = list[int]()
    while row:
        path.append(tree.token_ids[row])
        row = tree.parents[row]
    return path[::-1]


def _add(found: ExpectedNodes, parent: int, token: int, score: float) -> int:
    """Add a node. Returns its place."""
    found.token_ids.append(token)
    found.parents.append(parent)
    found.scores.append(score)
    return len(found.token_ids) - 1


def _only_token(words: NDArray[np.int32]) -> int | None:
    """The token that a mask allows, if it is one alone."""
    places = np.flatnonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(places[0]) * _WORD + word.bit_length() - 1
