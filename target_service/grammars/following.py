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
from target_service.grammars.row_masks import MaskedRows, TreeRows, compute_masks

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from target_service.grammars.vocabulary import TokenWords

_WORD = 32
# A path of expected text ends where more tokens than these may come, or where it is less probable. Chosen: ten digits
# and what may follow them are still listed.
_MOST_CHILDREN, _LEAST_CHANCE = 16, 1 / 64
# Of a token with which another one that may come begins, beside 1 for others. Chosen.
_CHANCE_OF_PREFIX = 0.1
# Of a processor, for the masks of one tree. Chosen: ten times what 20 rows of usual forms take, and what a pass takes.
_SLOW_SECONDS = 4e-3
# The probability of a row that somebody else drafted, as long as nothing is known of it. Chosen.
_OTHERS_CHANCE = 0.5


@dataclass(frozen=True)
class ConstrainedTree(TokenTree):
    """A tree without the rows that a grammar forbids, and with rows that it forces: tokens which alone may come."""

    forced: int = 0  # how many rows those are


class TreeMasks(NamedTuple):
    """Which tokens may follow each row: bit `token % 32` of `words[row, token // 32]`, words being int32. With an
    `error` they took more work than is allowed, and the output cannot go on."""

    words: NDArray[np.int32]
    error: InvalidField | None = None


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
        # Whether the masks of one tree took so long that it had better have no drafted rows, for which others wait.
        self.slow = False
        # The rows that were followed last, as far as the grammar allows them.
        self._rows: list[_FollowedRow] = []
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
        self._kept = found, TreeMasks(np.stack(words))
        return found

    def masks(self, tree: TokenTree, output: Sequence[int]) -> TreeMasks:
        """The masks of a tree's rows, whose root is the last token of `output`, or of the prompt where that is empty.
        Each output must continue the one of the last call."""
        return next(masks_of([self.follow(tree, output)]))

    def follow(self, tree: TokenTree | TreeRows, output: Sequence[int]) -> FollowedTree:
        """What `masks_of` computes masks of, together with those of other outputs: the rows of a tree, also as a device
        laid them out."""
        if self._kept is not None and self._kept[0] is tree and self._length == len(output):
            return FollowedTree(self, None, self._kept[1])
        self._read(output)
        return FollowedTree(self, MaskedRows.of(self._matcher, TreeRows(tree.token_ids, tree.parents)))

    def _read(self, output: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(output[self._length :]))
        self._length, self._kept, self._rows = len(output), None, []

    def _masked(self, masked: MaskedRows, words: NDArray[np.int32]) -> TreeMasks:
        """The masks of a tree's rows, given those that were computed; keeps the rows that the grammar allows."""
        tree = masked.tree
        self.slow |= masked.seconds > _SLOW_SECONDS
        some = list(map(bool, np.count_nonzero(words, axis=1)))
        places, rows = dict[int, int](), list[_FollowedRow]()
        for row, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            if row and not (parent in places and self._goes_on(words[parent], token)):
                words[row] = self._end_alone
                continue
            places[row] = len(rows)
            rows.append(_FollowedRow(token, row, places[parent], words[row]))
            if not some[row]:
                # Nothing is computed where a grammar ends, nor behind that.
                alone = self._words_behind(_path_to(rows))
                if alone is None:
                    return self._complexity(len(some))
                words[row] = alone
        if any([chain.rows[0] in places and chain.matcher.is_error() for chain in masked.chains]):
            return self._complexity(len(some))
        self._rows = rows
        return TreeMasks(words)

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
        number = len(self._rows)
        while places and len(found.token_ids) < most and masks > 0:
            negative, _, place = heapq.heappop(places)
            if place.path in seen:
                continue
            seen.add(place.path)
            words, path, node, matcher = place.words, place.path, place.node, place.matcher.deep_copy()
            if not matcher.consume_tokens(list(path[place.consumed :])):
                continue
            if words is None:
                masks -= 1
                forced = matcher.compute_ff_tokens()
                if self._ends.intersection(forced) or not matcher.consume_tokens(forced):
                    continue
                for token in forced:
                    path, node = (*path, token), _add(found, node, token, 1.0)
                    seen.add(path)
                words = self._words_of(matcher)
            for token, chance in ({} if words is None else self._children(words)).items():
                child = _add(found, node, token, chance)
                if -negative * chance >= _LEAST_CHANCE:
                    number += 1
                    behind = _Place(matcher, len(path), (*path, token), child)
                    heapq.heappush(places, (negative * chance, number, behind))
        return found

    def _add_rows(self, found: ExpectedNodes, places: list[tuple[float, int, _Place]]) -> None:
        """Add the rows that were followed last and behind which few tokens may come, to be looked behind."""
        # Where many tokens may come, more words than these have some.
        few = [np.count_nonzero(row.words) <= _MOST_CHILDREN for row in self._rows]
        wanted = [*few]
        for number in range(len(few) - 1, 0, -1):
            wanted[self._rows[number].parent] |= wanted[number]
        paths: list[tuple[int, ...]] = [()]
        nodes = [-1]
        for number, row in enumerate(self._rows):
            if number:
                paths.append((*paths[row.parent], row.token))
                parent = nodes[row.parent]
                nodes.append(_add(found, parent, row.token, _OTHERS_CHANCE) if wanted[number] else -1)
            if few[number]:
                place = _Place(self._matcher, 0, paths[number], nodes[number], row.words)
                places.append((-(_OTHERS_CHANCE ** len(paths[number])), number, place))

    def _children(self, words: NDArray[np.int32]) -> dict[int, float]:
        """The tokens that a mask allows, and how probable each is, without those that end the output; none where they
        are many. Of tokens with which others begin the longest are the usual ones."""
        places = np.flatnonzero(words)
        if len(places) > _MOST_CHILDREN:
            return {}
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, _WORD)
        tokens = [int(places[place]) * _WORD + int(bit) for place, bit in np.argwhere(bits)]
        if len(tokens) > _MOST_CHILDREN:
            return {}
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
        return TreeMasks(np.tile(self._end_alone, (rows, 1)), error)

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


def masks_of(trees: Sequence[FollowedTree], *, timed: bool = False) -> Iterator[TreeMasks]:
    """The masks of each tree, of outputs of one model; of each output the last tree that was followed. `timed` finds
    the grammars that are `slow`, also of so many rows that threads would compute them at once."""
    rows = [tree.rows for tree in trees if tree.rows is not None]
    computed = compute_masks(rows, trees[0].grammar.words, timed=timed) if trees else iter(())
    for tree in trees:
        if tree.rows is None:
            assert tree.kept is not None, "they are known"
            yield tree.kept
        else:
            yield tree.grammar._masked(tree.rows, next(computed))


def _path_to(rows: Sequence[_FollowedRow]) -> list[int]:
    """The tokens from below the root to the last of these rows."""
    path, place = list[int](), len(rows) - 1
    while place:
        path.append(rows[place].token)
        place = rows[place].parent
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
