"""Verified passes over a recorded text with late drafts: the rows of each pass, and the tokens that it accepts.

A pass reads a root, the last committed token, and rows below it. In lockstep it waits for a tree of its root. Behind,
it uses the tree of an earlier pass's root, below the tokens committed since. Where these leave the tree, the pass only
has prompt lookup, or is held until the tree of its own root arrives.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from draft_service.drafters.grown import GrownTrees
from draft_service.drafters.merging import merge_grown
from outrider.tree import TokenTree
from tree_kernels.node_table import longest_run
from tree_kernels.node_table.layout import LOOKUP, RIGHT

NOWHERE = -1
# After a token that was not drafted: the probability that the text continues as after the likeliest draft in its place,
# and as after the same token elsewhere in the tree. Tuned on the recordings.
INSTEAD = ELSEWHERE = 0.3


@dataclass(slots=True)
class Table:
    """A tree: for each node, the child and its probability given the node, by the child's token. Node 0 is the root."""

    children: list[dict[int, tuple[int, float]]] = field(default_factory=lambda: [{}])

    def add(self, parent: int, token: int, score: float) -> int:
        node = len(self.children)
        self.children[parent][token] = (node, score)
        self.children.append({})
        return node

    def walk(self, tokens: Sequence[int]) -> int:
        """The node at the end of the path of these tokens, or `NOWHERE`."""
        node = 0
        for token in tokens:
            found = self.children[node].get(token)
            if found is None:
                return NOWHERE
            node = found[0]
        return node


def mended(table: Table, node: int, token: int, *, last: bool) -> Table:
    """A tree of what may follow `token`, which is no child of `node` or a leaf there.

    It has the children of the likeliest node with the same token elsewhere. If the token is the last one, it also has
    those of the node's likeliest child, which the token may replace.
    """
    new = Table()
    same = _likeliest_of(table, token)
    if same != NOWHERE:
        _graft(table, same, new, 0, ELSEWHERE)
    below = table.children[node]
    if below and last:
        likeliest, _ = max(below.values(), key=lambda child: child[1])
        _graft(table, likeliest, new, 0, INSTEAD)
    return new


def _likeliest_of(table: Table, token: int) -> int:
    """The likeliest node of a token that has children, or `NOWHERE`."""
    found, best = NOWHERE, 0.0
    waiting = [(0, 1.0)]
    while waiting:
        node, path_prob = waiting.pop()
        for other, (child, score) in table.children[node].items():
            if other == token and table.children[child] and path_prob * score > best:
                found, best = child, path_prob * score
            waiting.append((child, path_prob * score))
    return found


def _graft(table: Table, node: int, new: Table, place: int, factor: float) -> None:
    """Copy the nodes below `node` to below `place` of another tree. Scores of equal children are added."""
    for token, (child, score) in table.children[node].items():
        equal = new.children[place].get(token)
        if equal is None:
            below = new.add(place, token, score * factor)
        else:
            below = equal[0]
            new.children[place][token] = (below, min(1.0, equal[1] + score * factor))
        _graft(table, child, new, below, 1.0)


def follow(table: Table, tokens: Sequence[int], mend: bool) -> tuple[Table, int]:
    """The node at the end of the path of these tokens, or `NOWHERE`, and its tree.

    With `mend` it is the root of a mended tree where the tokens leave the tree, or end at a leaf.
    """
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
    """The first `nodes` rows below the root, which are the best ones."""
    table = Table()
    for row in range(1, min(len(tree), nodes + 1)):
        table.add(tree.parents[row], tree.token_ids[row], tree.scores[row])
    return table


def tree_of(table: Table, root: int) -> TokenTree:
    """The `TokenTree` of a table, with this token at its root."""
    size = len(table.children)
    tokens, parents, scores = [root] * size, [0] * size, [1.0] * size
    for parent, below in enumerate(table.children):
        for token, (node, score) in below.items():
            tokens[node], parents[node], scores[node] = token, parent, score
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores))


def merged(tables: Sequence[Table], nodes: int) -> Table:
    """Merge trees as the merged drafter does: the higher score of equal nodes, and the best nodes."""
    (tree,) = merge_grown([GrownTrees.of([tree_of(table, 0)]) for table in tables], [nodes]).as_trees()
    return table_of(tree, nodes)


@dataclass(frozen=True, slots=True)
class Chain:
    """A draft by prompt lookup: tokens, and the probabilities of the first and of each following one."""

    tokens: tuple[int, ...] = ()
    first: float = 0.0
    following: float = 0.0


def looked_up(text: list[int]) -> Chain:
    """The chain that the device drafts by prompt lookup from a text that ends with the root."""
    run = longest_run(text)
    if not run.length:
        return Chain()
    source = text[run.end :]
    tokens = tuple(source[place % len(source)] for place in range(LOOKUP))
    return Chain(tokens, *RIGHT[run.length])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass without the root: their number, and how many were accepted and expected to be, which is the
    sum of their path probabilities."""

    count: int
    accepted: int
    expected: float


def rows_of(table: Table, node: int, chain: Chain, most: int, future: Sequence[int]) -> Rows:
    """Verify the best `most` rows below a node and along a chain against the next tokens of the text.

    A child of both is one node, with the higher probability; siblings that sum to more than 1 are scaled.
    """
    waiting: list[tuple[float, int, int, int, int, bool]] = []
    count = accepted = pushed = 0
    expected = 0.0
    # `link` is a node's place in the chain, or `NOWHERE`; `right`, whether its path agrees with the text.
    path_prob, link, depth, right = 1.0, 0, 0, True
    while True:
        below = table.children[node] if node != NOWHERE else {}
        candidates = {token: (child, score, NOWHERE) for token, (child, score) in below.items()}
        if 0 <= link < len(chain.tokens):
            token, prob = chain.tokens[link], chain.following if link else chain.first
            child, score, _ = candidates.get(token, (NOWHERE, 0.0, NOWHERE))
            candidates[token] = (child, max(score, prob), link + 1)
        scale = path_prob / max(1.0, sum(score for _, score, _ in candidates.values()))
        expected_token = future[depth] if right and depth < len(future) else NOWHERE
        for token, (child, score, next_link) in candidates.items():
            entry = (-scale * score, pushed, child, next_link, depth + 1, token == expected_token)
            heapq.heappush(waiting, entry)
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
    """How passes get their drafts.

    Attributes:
        rows: of a pass, without the root.
        behind: age of a tree in passes: 0 is lockstep, 1 a draft that answers while the next pass runs.
        hold: when a pass is held for the tree of its own root: "never", "miss" where the tokens left the tree at hand,
            "promise" where the pass is expected to emit fewer tokens than `least`.
        lookup: whether prompt lookup is merged.
        mend: whether a tree that the tokens left is still used; see `mended`.
    """

    rows: int
    behind: int
    hold: str = "never"
    least: float = 0.0
    lookup: bool = True
    mend: bool = False


@dataclass
class Tally:
    """Sums over passes. `hits` had rows of an earlier tree, `held` passes waited for their own."""

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
        """Passes that neither had rows of a tree nor were held."""
        return self.passes - self.hits - self.held


def walk(
    text: Sequence[int],
    roots: range,
    trees: Mapping[int, Table],
    chains: Mapping[int, Chain],
    way: Way,
    near: Mapping[int, Table] | None = None,
) -> Tally:
    """Run passes from the first root to the end of a text.

    Args:
        text: all tokens.
        roots: positions at which passes may begin.
        trees: of each of these positions.
        chains: by prompt lookup at each.
        near: the trees that held passes wait for, if not `trees`.
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
        # At the end of the text there is no token after the accepted ones.
        emitted = min(found.accepted + 1, len(future))
        tally.passes += 1
        tally.tokens += emitted
        tally.rows += found.count
        tally.expected += found.expected
        if held:
            tally.held, tally.held_tokens = tally.held + 1, tally.held_tokens + emitted
        elif hit:
            tally.hits, tally.hit_tokens = tally.hits + 1, tally.hit_tokens + emitted
        else:
            tally.miss_tokens += emitted
        root += emitted
    return tally
