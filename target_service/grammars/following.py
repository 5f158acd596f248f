"""One output's grammar: which tokens may come after each row of a tree, and which must."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidField
from outrider.structured_output import StructuredOutput
from outrider.tree import TokenTree
from target_service.grammars.expected_text import ExpectedNodes, ExpectedText, Trail
from target_service.grammars.known_masks import FormMasks, KnownRows, OutputMasks, write_known
from target_service.grammars.row_masks import (
    MaskedRows,
    ReachedRows,
    TreeRows,
    compute_masks,
    find_reached,
)

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from target_service.grammars.vocabulary import TokenWords

_WORD = 32


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


class FollowedGrammar:
    """The state of a grammar after the tokens of one output: they alone decide it."""

    def __init__(
        self,
        matcher: LLMatcher,
        form: StructuredOutput,
        vocabulary_size: int,
        end_token_ids: Sequence[int],
        tokens: TokenWords,
        expected: ExpectedText,
    ) -> None:
        """`matcher` is at its beginning, and nothing else uses it; `tokens` are those of the model, and `expected` is
        shared by the form's outputs. Symbols: V is the vocabulary size."""
        self._matcher = matcher
        # How much of the output it has read: nothing is read where every mask is known.
        self._read_to = 0
        # Masks of the form that are known.
        self._known: OutputMasks | None = None
        # Outputs whose `lexer` is the same object share one: no two threads compute masks of it at once.
        self.lexer: object = matcher
        # Makes a matcher with a lexer of its own; None where the output has one.
        self._make_own: Callable[[], LLMatcher] | None = None
        self._tokens_of, self._forced_text, self._expected = tokens.marked, tokens.forced, expected
        self._form = form
        # The last token that the matcher has read, -1 for none, and those that are known to be forced behind it.
        self._last, self._forced = -1, tuple[int, ...]()
        # The output, of whose tokens the matcher has read so many, behind others: see `begin_behind`.
        self._output: Sequence[int] = ()
        self._length = self._began_at = 0
        self._begun: Sequence[int] = ()
        self.words = -(-vocabulary_size // _WORD)
        self._ends = frozenset(end_token_ids)
        bits = np.zeros(self.words * _WORD, bool)
        bits[list(end_token_ids)] = True
        # The tree that `constrained` made last, and its masks.
        self._kept: tuple[TokenTree, TreeMasks] | None = None
        # Whether the masks of one tree took so long that it has no drafted rows from then on, and its sequence sits out
        # of passes until they are there.
        self.slow = False
        # Whether masks of the tree that was followed last took so long that others were not computed: its outcome must
        # not be used.
        self.late = False
        # The rows that were followed last.
        self._followed: _MaskedTree | None = None
        # See `ExpectedText`.
        self._trail = Trail()
        # [words] int32: the end alone. For rows that no walk reaches, whose logits need some distribution.
        self._end_alone = np.packbits(bits, bitorder="little").view(np.int32)

    def begin_behind(self, output: Sequence[int], text: bytes) -> None:
        """Begin behind an output, which has the form's first `text` at its end. Once, before anything else."""
        self._begun = self._tokens_of(text)
        self._matcher.consume_tokens(list(self._begun))
        self._last = self._begun[-1] if self._begun else -1
        self._length = self._began_at = self._read_to = len(output)
        if self._known is not None:
            self._known.read(self._begun)

    def share(self, lexer: object, make_own: Callable[[], LLMatcher], masks: FormMasks | None) -> None:
        """The matcher shares a `lexer` with others of the same form, and known `masks`; `make_own` makes one at its
        beginning that shares none. Once, before anything else."""
        self.lexer, self._make_own = lexer, make_own
        self._known = None if masks is None else OutputMasks(masks)

    def _leave_lexer(self) -> bool:
        """Read the output with a matcher of its own from now on: what other outputs brought a lexer to counts against
        its limits. False where it has one already."""
        if self._make_own is None:
            return False
        self._matcher, self._make_own = self._make_own(), None
        self.lexer, self._known = self._matcher, None
        self._matcher.consume_tokens([*self._begun, *self._output[self._began_at : self._length]])
        self._read_to = self._length
        return True

    def _reader(self) -> LLMatcher:
        """The matcher, which has read the output."""
        if self._read_to < self._length:
            self._matcher.consume_tokens(list(self._output[self._read_to : self._length]))
            self._read_to = self._length
        return self._matcher

    def constrained(self, tree: TokenTree, output: Sequence[int], most: int) -> TokenTree:
        """A tree of up to `most` rows below its root, made of one that has no more: without the rows that the grammar
        forbids, and with those that it forces where the tree ends. Its masks are kept for the next call of `masks`.
        Takes what `masks` does, and no draft distributions, which a row that is left out would make wrong."""
        rows = self._follow(tree, output, most)
        if rows is None and self._leave_lexer():
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

    def follow(self, tree: TokenTree | TreeRows, output: Sequence[int], *, may_be_late: bool = False) -> FollowedTree:
        """What `masks_of` computes masks of, together with those of other outputs: the rows of a tree, also as a device
        laid them out. Of one that `may_be_late` masks that take long are not computed, but for the root's; see
        `late`."""
        self.late = False
        if self._kept is not None and self._keeps(tree, output):
            return FollowedTree(self, None, self._kept[1])
        self._read(output)
        own = TreeRows(tree.token_ids, tree.parents)
        known = None if self._known is None else self._known.rows(own)
        if known is not None and not known.states:
            return FollowedTree(self, None, None, own, known)
        words = {} if known is None else known.words()
        rows = MaskedRows.of(self._reader(), own, self.lexer, self._forced_text, self._last, self._forced, words)
        if may_be_late:
            rows.most_seconds = _most_seconds(len(tree.token_ids))
        return FollowedTree(self, rows, None, own, known)

    def has_masks(self, tree: TokenTree, output: Sequence[int]) -> bool:
        """Whether the masks of a tree are kept, or were computed for a step that is still under way."""
        return self._keeps(tree, output) or (self._followed is not None and self._length == len(output))

    def compute_ahead(self, tree: TokenTree, output: Sequence[int]) -> None:
        """Compute the masks of a tree and keep them for the step that has it. In any thread; nothing else may use the
        grammar meanwhile."""
        # Others would wait for the lexer as long as the mask takes.
        self._leave_lexer()
        masks = self.masks(tree, output)
        self._kept = tree, masks

    def _keeps(self, tree: TokenTree | TreeRows, output: Sequence[int]) -> bool:
        if self._kept is None or self._length != len(output):
            return False
        # Roots alone are all the same.
        return self._kept[0] is tree or len(self._kept[0].token_ids) == len(tree.token_ids) == 1

    def _read(self, output: Sequence[int]) -> None:
        tokens = list(output[self._length :])
        if tokens:
            self._last = tokens[-1]
            self._trail, self._forced = self._behind(self._followed, tokens)
        if self._known is not None:
            self._known.read(tokens)
        self._output, self._length, self._kept, self._followed = output, len(output), None, None

    def _behind(self, followed: _MaskedTree | None, tokens: Sequence[int]) -> tuple[Trail, tuple[int, ...]]:
        """The trail behind tokens that follow the root of a tree, and the tokens that are forced there, as far as its
        rows show them."""
        trail, row, forced = self._trail, 0, tuple[int, ...]()
        if followed is None:
            return trail, forced
        tree, few, known = followed
        for token in tokens:
            if row < 0:
                return trail, ()
            forced = known.get(row, forced)
            forced = forced[1:] if forced[:1] == (token,) else ()
            trail = self._expected.trail_behind(trail, few[row], token)
            row = _child_of(tree, row, token)
        return trail, forced

    def _masked(
        self,
        masked: MaskedRows,
        reached: ReachedRows,
        room: NDArray[np.int32],
        free: int,
        few: list[tuple[int, ...]] | None,
        known: KnownRows | None,
    ) -> tuple[TreeMasks, int]:
        """The masks of a tree's rows, given those that were computed in `room`, and its first place that is then free;
        `free` is the first one now. `few` as in `_MaskedTree`, if every mask was computed that is needed. What was
        computed is added to what is `known`, if anything can be."""
        tree = masked.tree
        self.slow |= masked.late or masked.seconds > _most_seconds(len(tree.token_ids))
        self.late = masked.late
        if self.late:
            return TreeMasks(room, np.zeros(len(tree.token_ids), np.int32)), free
        failed = any([chain.matcher.is_error() and reached.words[chain.rows[0]] >= 0 for chain in masked.chains])
        if failed or few is None:
            end = None if failed else self._compute_lacking(tree, reached, room, count(free))
            if end is None and self._leave_lexer():
                end = self._compute_lacking(tree, masked.without_masks(reached), room, masked.places_from(free))
            if end is None:
                return self._complexity(len(tree.token_ids)), free
            few, free = reached.few(), max(free, end)
        if known is not None and self._known is not None and not failed:
            computed = {row: by for row, by in masked.depends_on_last.items() if reached.words[row] > 0}
            self._known.add(known, tree, computed, room, reached.places, few)
        self._followed = _MaskedTree(tree, few, masked.forced)
        return TreeMasks(room, reached.places), free

    def _compute_lacking(
        self, tree: TreeRows, reached: ReachedRows, room: NDArray[np.int32], places: Iterator[int]
    ) -> int | None:
        """Compute what was not: nothing is where a grammar ends, nor behind that. Returns the next of the `places` of
        `room` that are free now; None where the grammar has met a limit."""
        while len(lacking := np.flatnonzero(reached.words == 0)):
            row = int(lacking[0])
            words = self._words_behind(_path_to(tree, row))
            if words is None:
                return None
            if not reached.places[row]:
                reached.places[row] = next(places)
            room[reached.places[row]] = words
            parents = np.array([-1, *tree.parents[1:]], np.int32)
            find_reached(np.array(tree.token_ids, np.int32), parents, room, *reached)
        return next(places)

    def _words_behind(self, path: Sequence[int]) -> NDArray[np.int32] | None:
        """The mask behind tokens that follow the output; None where there is none."""
        matcher = self._reader().deep_copy()
        return self._words_of(matcher) if matcher.consume_tokens(list(path)) else None

    def expected(self, most: int, masks: int) -> tuple[ExpectedNodes, int]:
        """About `most` tokens that are likely to follow the output of the last call of `masks`: text that is forced,
        and where few tokens may come each of them, behind the output and behind rows of its tree. Text that is not
        known yet is looked for as long as any `masks` may be computed; how many may then be is returned too. The nodes
        may be those that all outputs of the form share, so nothing may be added to them."""
        found, followed = ExpectedNodes(), self._followed
        if followed is None or not any(followed.few):
            return found, masks
        tree, few, _ = followed
        known, masks = self._expected.behind(self._trail, few[0], self._reader, (), masks)
        if known is not None:
            found = known
        if len(few) == 1:
            return found, masks
        wanted = list(map(bool, few))
        for row in range(len(few) - 1, 0, -1):
            wanted[tree.parents[row]] |= wanted[row]
        paths: list[tuple[int, ...]] = [()] * len(few)
        nodes, trails = [-1] * len(few), [self._trail] * len(few)
        for row, token in enumerate(tree.token_ids):
            if row and wanted[row]:
                parent = tree.parents[row]
                paths[row] = (*paths[parent], token)
                trails[row] = self._expected.trail_behind(trails[parent], few[parent], token)
        # Rows near the root first: they are the likeliest.
        for row in sorted([row for row in range(1, len(few)) if wanted[row]], key=lambda row: len(paths[row])):
            above, token = nodes[tree.parents[row]], tree.token_ids[row]
            nodes[row] = found.child(above, token)
            if nodes[row] < 0:
                found = found.copy() if found is known else found
                # The probability of a row that somebody else drafted, as long as nothing is known of it. Chosen.
                nodes[row] = found.add(above, token, 0.5)
            # Where text behind a row was expected above it, that is the same.
            if few[row] and len(found) < most and not found.has_children(nodes[row]):
                behind, masks = self._expected.behind(trails[row], few[row], self._reader, paths[row], masks)
                if behind is not None and len(behind):
                    found = found.copy() if found is known else found
                    found.add_below(nodes[row], behind)
        return found, masks

    def _complexity(self, rows: int) -> TreeMasks:
        problem = "is too complex: a token of this output takes more work than is allowed"
        error = InvalidField(f"sampling.structured_output.{self._form.form}", problem)
        return TreeMasks(self._end_alone[None], np.zeros(rows, np.int32), error)

    def _follow(self, tree: TokenTree, output: Sequence[int], most: int) -> list[_FollowedRow] | None:
        """The rows that the grammar allows, depth first, with forced ones below those that end the tree, up to `most`
        below the root in all. Leads the matcher back to the root. None where it has met a limit."""
        self._read(output)
        self._reader()
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


class _MaskedTree(NamedTuple):
    """Rows of a tree, the tokens that may follow each, none where they are many or no walk reaches the row, and those
    that are forced, see `MaskedRows`."""

    tree: TreeRows
    few: list[tuple[int, ...]]
    forced: dict[int, tuple[int, ...]]


class _FollowedRow(NamedTuple):
    token: int
    source: int  # the row of the tree that was followed; -1 for one that was forced
    parent: int
    words: NDArray[np.int32]  # what may come next


class FollowedTree(NamedTuple):
    """A tree of one output, of which `masks_of` computes the masks."""

    grammar: FollowedGrammar
    rows: MaskedRows | None  # None where all masks are known
    kept: TreeMasks | None = None  # where they are kept
    tree: TreeRows = TreeRows((), ())
    known: KnownRows | None = None


def masks_of(trees: Sequence[FollowedTree], room: NDArray[np.int32]) -> tuple[list[TreeMasks], int]:
    """The masks of each tree, of outputs of one model; of each output the last tree that was followed. They are written
    to `room` [1 + rows, words], and how many of its places have one is returned too."""
    if not trees:
        return [], 0
    room[0] = trees[0].grammar._end_alone
    all_known = [tree.known for tree in trees if tree.rows is None and tree.known is not None]
    places, free = write_known(all_known, room)
    computed = [tree.rows for tree in trees if tree.rows is not None]
    reached = ReachedRows.empty(0)
    if computed:
        reached, free = compute_masks(computed, room, free)
    masks, first, whole, known = list[TreeMasks](), 0, bool(reached.words.all()), 0
    # Of all at once: a call of numpy takes longer than what it does with the rows of one.
    few = reached.few() if whole else []
    for tree in trees:
        if tree.kept is not None:
            count = len(tree.kept.places)
            room[free : free + count] = tree.kept.words
            masks.append(TreeMasks(room, np.arange(free, free + count, dtype=np.int32), tree.kept.error))
            free += count
        elif tree.rows is None:
            assert tree.known is not None, "its masks are known"
            end = known + len(tree.tree.token_ids)
            masks.append(TreeMasks(room, places[known:end]))
            tree.grammar._followed = _MaskedTree(tree.tree, tree.known.few(), {})
            known = end
        else:
            end = first + len(tree.rows.tree.token_ids)
            own, own_few = reached.part(first, end), few[first:end] if whole else None
            made, free = tree.grammar._masked(tree.rows, own, room, free, own_few, tree.known)
            masks.append(made if made.error is None else made._replace(found=room))
            first = end
    return masks, free


def _child_of(tree: TreeRows, row: int, token: int) -> int:
    """The first row below another one that has a token; -1 if none has."""
    for below in range(row + 1, len(tree.token_ids)):
        if tree.parents[below] == row and tree.token_ids[below] == token:
            return below
    return -1


def _most_seconds(rows: int) -> float:
    """Seconds of a processor that the masks of a tree take at most, if its grammar is none that is slow."""
    # Of a processor, for the masks of one tree, beside what those of a usual form take: at the beginning of a string
    # with a bounded length 0.1 to 0.3 ms each, of 49,152 tokens. Chosen: half of what a pass takes.
    return 4e-3 + 2.5e-4 * rows


def _path_to(tree: TreeRows, row: int) -> list[int]:
    """The tokens from below the root to a row."""
    path = list[int]()
    while row:
        path.append(tree.token_ids[row])
        row = tree.parents[row]
    return path[::-1]


def _only_token(words: NDArray[np.int32]) -> int | None:
    """The token that a mask allows, if it is one alone."""
    places = np.flatnonzero(words)
    if len(places) != 1:
        return None
    word = int(words[places[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(places[0]) * _WORD + word.bit_length() - 1
