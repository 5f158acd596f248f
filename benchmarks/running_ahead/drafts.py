"""Drafts at every position of recorded answers, for `simulate.py`: by head, trie, both, and prompt lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from benchmarks.running_ahead.head import Drawn, HeadTrees, pruned
from benchmarks.running_ahead.recording import Recording
from benchmarks.running_ahead.walk import Chain, Table, looked_up, merged, table_of
from draft_service.drafters.base import DraftSequence
from draft_service.ngram.config import TrieConfig
from draft_service.ngram.drafter import NgramDrafter
from outrider.tree import TokenTree

HEAD, TRIE_NEW, TRIE_WARM, MERGED_NEW, MERGED_WARM, LOOKUP = (
    "head", "trie, new", "trie, warm", "merged, new", "merged, warm", "lookup"
)  # fmt: skip
SOURCES = (HEAD, TRIE_NEW, TRIE_WARM, MERGED_NEW, MERGED_WARM, LOOKUP)
_TRIE_OF = {MERGED_NEW: TRIE_NEW, MERGED_WARM: TRIE_WARM}
# Of the largest trees, from which smaller ones are pruned.
LEVELS, WIDTH, BREADTH = 16, 32, 8
# Many nodes and a very low floor, since passes choose their rows.
TRIE_NODES = 239
_TRIE_FLOOR = 0.001


@dataclass(frozen=True, slots=True)
class HeadTreeShape:
    """A head's levels, nodes expanded at each, children of a node, nodes kept, and the least probability of a node's
    path; the number of nodes is for tries too."""

    levels: int
    width: int
    breadth: int
    nodes: int
    floor: float = 0.0


@dataclass
class Drafts:
    """One recording's drafts by position. `missing` counts nodes that a smaller shape would have expanded, but the
    largest did not."""

    recording: Recording
    head: dict[int, Drawn]
    tries: dict[str, dict[int, TokenTree]]
    chains: dict[int, Chain]
    missing: int = 0
    expanded: int = 0
    _tables: dict[tuple[str, HeadTreeShape], dict[int, Table]] = field(default_factory=dict)

    def tables(self, source: str, shape: HeadTreeShape) -> dict[int, Table]:
        """The trees of one source and shape, which are kept."""
        key = source, shape
        if key not in self._tables:
            self._tables[key] = self._make(source, shape)
        return self._tables[key]

    def clear(self) -> None:
        """Drop the kept tables, which are large."""
        self._tables.clear()

    def _make(self, source: str, shape: HeadTreeShape) -> dict[int, Table]:
        if source == LOOKUP:
            return {root: Table() for root in self.recording.roots}
        if source == HEAD:
            return {root: self._head_table(drawn, shape) for root, drawn in self.head.items()}
        if source in self.tries:
            return {root: table_of(tree, shape.nodes) for root, tree in self.tries[source].items()}
        head, trie = self.tables(HEAD, shape), self.tables(_TRIE_OF[source], shape)
        return {root: merged([head[root], trie[root]], shape.nodes) for root in head}

    def _head_table(self, drawn: Drawn, shape: HeadTreeShape) -> Table:
        items, missing = pruned(drawn, shape.levels, shape.width, shape.breadth, shape.nodes)
        self.missing += missing
        self.expanded += 1 + (shape.levels - 1) * shape.width
        items = items[drawn.path_probs[items] >= shape.floor]
        table, places = Table(), {0: 0}
        tokens, parents = drawn.tokens[items].tolist(), drawn.parents[items].tolist()
        scores = drawn.scores[items].tolist()
        for item, token, parent, score in zip(items.tolist()[1:], tokens[1:], parents[1:], scores[1:], strict=True):
            places[item] = table.add(places[parent], token, score)
        return table


def trie_trees(
    recordings: Sequence[Recording], warm: bool, nodes: int = TRIE_NODES, floor: float = _TRIE_FLOOR
) -> dict[int, dict[int, TokenTree]]:
    """The trie's tree at every position of the recordings that have states, by place of the recording.

    It learns prompts and answers. With `warm` all are of one tenant, in their order, so that a text profits from those
    before it; otherwise each has its own tenant. `nodes` and `floor` bound its trees as `TrieConfig` says.
    """
    drafter = NgramDrafter(TrieConfig(num_draft_tokens=nodes, min_score=floor))
    drafter.start()
    found: dict[int, dict[int, TokenTree]] = {}
    for place, one in enumerate(recordings):
        if one.states is None and not warm:
            continue
        tenant = "all" if warm else str(place)
        known = one.token_ids[: one.prompt_length]
        sequence = DraftSequence(place, list(known), one.prompt_length, 1 << 20, tenant)
        drafter.open(sequence)
        trees: dict[int, TokenTree] = {}
        for root in range(one.prompt_length, len(one.token_ids)):
            token = one.token_ids[root]
            sequence.token_ids.append(token)
            drafter.advance(sequence, [token])
            trees[root] = drafter.propose([sequence])[0]
            # The next tree must not depend on timing.
            drafter.flush()
        drafter.close(sequence)
        drafter.flush()
        if one.states is not None:
            found[place] = {root: trees[root] for root in one.roots}
    drafter.stop()
    return found


def write_trees(path: Path, trees: Mapping[int, Drawn]) -> None:
    """Write every array of every tree, by position and name."""
    names = [each.name for each in fields(Drawn)]
    save_file({f"{root}.{name}": getattr(tree, name) for root, tree in trees.items() for name in names}, path)


def read_trees(path: Path) -> dict[int, Drawn]:
    """Read the file of `write_trees`."""
    arrays: dict[int, dict[str, Any]] = {}
    for key, array in load_file(path).items():
        root, name = key.split(".")
        arrays.setdefault(int(root), {})[name] = array
    return {root: Drawn(**own) for root, own in sorted(arrays.items())}


def draw_all(recordings: Sequence[Recording], head: HeadTrees, folder: Path) -> list[Drafts]:
    """Drafts of the recordings that have states. The head's trees take minutes, so they are kept in `folder`."""
    new, warm = trie_trees(recordings, warm=False), trie_trees(recordings, warm=True)
    drafts = []
    for place, one in enumerate(recordings):
        if one.states is None:
            continue
        kept = folder / f"head_{place}.safetensors"
        if kept.exists():
            trees = read_trees(kept)
        else:
            trees = head.draw(one)
            write_trees(kept, trees)
        chains = {root: looked_up(one.token_ids[: root + 1]) for root in one.roots}
        drafts.append(Drafts(one, trees, {TRIE_NEW: new[place], TRIE_WARM: warm[place]}, chains))
    return drafts
