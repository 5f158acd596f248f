"""Verified passes over a recorded text whose drafts come late: which rows a pass has, and what it accepts.

A pass reads a root, the last token that is certain, and rows below it. In lockstep its tree was drawn from that very
root, and the pass waited for it. Behind, it is what is left of a tree that was drawn from the root of a pass before,
once the tokens said since are walked down; where they leave the tree, only the text itself is left to look things up
in, or the pass is held until the tree of its own root is there.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.merging import merge_trees
from outrider.tree import TokenTree
from tree_kernels.node_table import LOOKUP, RIGHT, longest_run

NOWHERE = -1
# How often what follows a token that was not foreseen is what was to follow the likeliest one in its place, how often
# it is what was to stand in its place, and how often what was to follow the same token elsewhere. Tried out on the
# recordings.
INSTEAD, BEFORE, ELSEWHERE = 0.3, 0.15, 0.3


@dataclass(slots=True)
class Table:
    """A tree to be walked: of each node, its children's tokens, and of each child the node and its probability given
    its parent. Node 0 is the root."""

    children: list[dict[int, tuple[int, float]]] = field(default_factory=lambda: [{}])

    def add(self, parent: int, token: int, score: float) -> int:
        node = len(self.children)
        self.children[parent][token] = (node, score)
        self.children.append({})
        return node

    def walk(self, tokens: Sequence[int]) -> int:
        """The node that tokens lead to from the root, or `NOWHERE`."""
        node = 0
        for token in tokens:
            found = self.children[node].get(token)
            if found is None:
                return NOWHERE
            node = found[0]
        return node


def mended(table: Table, node: int, token: int, *, last: bool) -> Table:
    """What may follow a token that is no child of a node, or a leaf: what was to follow it elsewhere; and where it is
    the last one, what hangs below the likeliest child, where the token stands in its place, or the children
    themselves, where the token was put before them."""
    new = Table()
    lender = _likeliest_of(table, token)
    if lender != NOWHERE:
        _graft(table, lender, new, 0, ELSEWHERE)
    below = table.children[node]
    if below and last:
        likeliest, _ = max(below.values(), key=lambda child: child[1])
        _graft(table, likeliest, new, 0, INSTEAD)
        _graft(table, node, new, 0, BEFORE)
    return new


def _likeliest_of(table: Table, token: int) -> int:
    """The likeliest node of a token with anything below it, or `NOWHERE`."""
    found, best = NOWHERE, 0.0
    waiting = [(0, 1.0)]
    while waiting:
        node, chance = waiting.pop()
        for said, (child, score) in table.children[node].items():
            if said == token and table.children[child] and chance * score > best:
                found, best = child, chance * score
            waiting.append((child, chance * score))
    return found


def _graft(table: Table, node: int, new: Table, place: int, factor: float) -> None:
    """Hang what is below a node below a place of another tree. Scores of children that stand there already add up."""
    for token, (child, score) in table.children[node].items():
        there = new.children[place].get(token)
        if there is None:
            below = new.add(place, token, score * factor)
        else:
            below = there[0]
            new.children[place][token] = (below, min(1.0, there[1] + score * factor))
        _graft(table, child, new, below, 1.0)


def follow(table: Table, tokens: Sequence[int], mend: bool) -> tuple[Table, int]:
    """The tree and the node that tokens lead to from a root, or `NOWHERE`; with `mend` in a tree that is mended where
    it does not hold them, or nothing below the last."""
    node = 0
    for place, token in enumerate(tokens):
        found = table.children[node].get(token)
        if found is None:
            new = mended(table, node, tokens[-1], last=place == len(tokens) - 1) if mend else Table()
            return (new, 0) if new.children[0] else (table, NOWHERE)
        node = found[0]
    if mend and tokens and not table.children[node]:
        new = mended(table, node, tokens[-1], last=False)
        if new.children[0]:
            return new, 0
    return table, node


def table_of(tree: TokenTree, nodes: int) -> Table:
    """The first `nodes` rows below the root, which are the best of them."""
    table = Table()
    for row in range(1, min(len(tree), nodes + 1)):
        table.add(tree.parents[row], tree.token_ids[row], tree.scores[row])
    return table


def tree_of(table: Table, root: int) -> TokenTree:
    """A table as the services know trees."""
    size = len(table.children)
    tokens, parents, scores = [root] * size, [0] * size, [1.0] * size
    for parent, below in enumerate(table.children):
        for token, (node, score) in below.items():
            tokens[node], parents[node], scores[node] = token, parent, score
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


def merged(tables: Sequence[Table], nodes: int) -> Table:
    """As the merged drafter does it: the higher of two scores, and the best nodes."""
    return table_of(merge_trees([tree_of(table, 0) for table in tables], nodes), nodes)


@dataclass(frozen=True, slots=True)
class Chain:
    """What is looked up in the text itself: tokens, and how likely the first is and each of the following."""

    tokens: tuple[int, ...] = ()
    first: float = 0.0
    following: float = 0.0


def looked_up(text: list[int]) -> Chain:
    """What the device drafts from a text that ends with the root."""
    run = longest_run(text)
    if not run.length:
        return Chain()
    source = text[run.end :]
    tokens = tuple(source[place % len(source)] for place in range(LOOKUP))
    return Chain(tokens, *RIGHT[run.length])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass, the root not counted: how many, how many the text agrees with, and how many were expected
    to: the sum of the probabilities of their paths."""

    count: int
    accepted: int
    expected: float


def rows_of(table: Table, node: int, chain: Chain, most: int, future: Sequence[int]) -> Rows:
    """Verify the best `most` rows below a node and along a chain against what the text says next.

    A child that both propose is one, with the higher probability; siblings that sum to more than 1 are scaled.
    """
    waiting: list[tuple[float, int, int, int, int, bool]] = []
    count = accepted = pushed = 0
    expected = 0.0
    path_prob, link, depth, right = 1.0, 0, 0, True
    while True:
        below = table.children[node] if node != NOWHERE else {}
        looked, chance = NOWHERE, 0.0
        total = sum(score for _, score in below.values())
        if 0 <= link < len(chain.tokens):
            looked, chance = chain.tokens[link], chain.following if link else chain.first
            total += max(0.0, chance - below[looked][1]) if looked in below else chance
        scale = path_prob / max(1.0, total)
        said = future[depth] if right and depth < len(future) else NOWHERE
        for token, (child, score) in below.items():
            same = token == looked
            heapq.heappush(
                waiting,
                (
                    -scale * (max(score, chance) if same else score),
                    pushed,
                    child,
                    link + 1 if same else NOWHERE,
                    depth + 1,
                    token == said,
                ),
            )
            pushed += 1
        if looked != NOWHERE and looked not in below:
            heapq.heappush(waiting, (-scale * chance, pushed, NOWHERE, link + 1, depth + 1, looked == said))
            pushed += 1
        if not waiting or count == most:
            return Rows(count, accepted, expected)
        negative, _, node, link, depth, right = heapq.heappop(waiting)
        path_prob = -negative
        count += 1
        expected += path_prob
        if right:
            accepted = max(accepted, depth)


@dataclass(frozen=True, slots=True)
class Way:
    """How passes are drafted for.

    Attributes:
        rows: of a pass, the root not counted.
        behind: passes that a tree is old: 0 is lockstep, 1 a draft that answers while the next pass runs.
        hold: how a pass is held for the tree of its own root: "never", "miss" where the tokens left the tree that is
            there, "promise" where the pass is expected to say fewer tokens than `least`.
        least: tokens.
        lookup: whether what the text itself says is merged.
        mend: whether a tree that tokens have left is of use still, see `mended`.
    """

    rows: int
    behind: int
    hold: str = "never"
    least: float = 0.0
    lookup: bool = True
    mend: bool = False


@dataclass
class Tally:
    """Sums over passes: `hits` had rows of a tree; `held` waited for one."""

    passes: int = 0
    tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    held: int = 0
    held_tokens: int = 0
    miss_tokens: int = 0
    rows: int = 0
    expected: float = 0.0

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def misses(self) -> int:
        """Passes that had no rows of a tree, and were not held."""
        return self.passes - self.hits - self.held


def walk(
    text: Sequence[int],
    roots: range,
    trees: Mapping[int, Table],
    chains: Mapping[int, Chain],
    way: Way,
    near: Mapping[int, Table] | None = None,
) -> Tally:
    """Pass after pass from the first root to the end of a text.

    Args:
        text: all of it.
        roots: positions that may be one.
        trees: drawn from each position.
        chains: looked up at each.
        near: the trees that held passes wait for, where they are others.
    """
    tally, nothing, none = Tally(), Table(), Chain()
    path: list[int] = []
    root = roots.start
    while root in roots:
        path.append(root)
        chain = chains[root] if way.lookup else none
        future = text[root + 1 :]
        table, node, hit = nothing, NOWHERE, False
        if len(path) > way.behind:
            base = path[-1 - way.behind]
            table = trees[base]
            at = table.walk(text[base + 1 : root + 1])
            hit = at != NOWHERE and bool(table.children[at])
            table, node = follow(table, text[base + 1 : root + 1], way.mend)
        found = rows_of(table, node, chain, way.rows, future)
        short = 1 + found.expected < way.least if way.hold == "promise" else not hit
        held = way.behind > 0 and way.hold != "never" and short
        if held:
            found = rows_of((near or trees)[root], 0, chain, way.rows, future)
        # The last token is said by whichever pass accepts the one before it.
        said = min(found.accepted + 1, len(future))
        tally.passes += 1
        tally.tokens += said
        tally.rows += found.count
        tally.expected += found.expected
        if held:
            tally.held, tally.held_tokens = tally.held + 1, tally.held_tokens + said
        elif hit:
            tally.hits, tally.hit_tokens = tally.hits + 1, tally.hit_tokens + said
        else:
            tally.miss_tokens += said
        root += said
    return tally
