"""The largest trees of an EAGLE head at every position of a recorded text, for `simulate.py`.

The head reads the whole text once, and all trees share its keys. Growth (`level_growth`) and network are the drafter's;
only keys are kept differently, because a drafter's cache has room for one tree of a sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.running_ahead.recording import Recording
from draft_service.eagle.head import EagleHead
from draft_service.eagle.head_drafter import HeadNetwork
from draft_service.neural.candidates import most_probable
from draft_service.neural.level_growth import GREEDY, Forest, Rules, grow_level, make_forest
from draft_service.neural.network import RowOutput
from tree_kernels.growth import GREEDY_TEMPERATURE
from tree_models.layers.paged import UncachedPass

# More than any tree has, so that all nodes are kept while it grows.
_ALL_NODES = 1 << 20
# Less likely paths are dropped from a finished tree. Chosen: no pass has rows for them.
_LEAST_PATH_PROB = 1e-6


@dataclass(frozen=True)
class Drawn:
    """A tree in the order of its growth: level by level, and the best child of a node first. Node 0 is the root.

    Attributes:
        tokens, parents, levels: [n].
        scores: [n] probability given the parent.
        path_probs: [n] probability of the path.
        expanded: [n] whether the head drafted its children.
    """

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    levels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float64]
    path_probs: npt.NDArray[np.float64]
    expanded: npt.NDArray[np.bool_]


class _TextPass(UncachedPass):
    """Causal attention over a text. Keeps keys and values for the trees: [heads, tokens, D] of each layer."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:  # noqa: ARG002
        self.keys.append(key.transpose(0, 1))
        self.values.append(value.transpose(0, 1))
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out[0].transpose(0, 1)


class _TreePass(UncachedPass):
    """Attention of one level's rows of several trees over the text before their roots and their own ancestors."""

    def __init__(self, text: _TextPass, roots: Sequence[int], tail: int, levels: int) -> None:
        self._text, self._roots = text, torch.tensor(roots)
        self._longest = max(roots)
        heads, _, width = text.keys[0].shape
        self._keys = [torch.zeros(len(roots), tail, heads, width) for _ in text.keys]
        self._values = [torch.zeros(len(roots), tail, heads, width) for _ in text.keys]
        # [trees, tail, levels] ancestors of each row of the tail, and the row itself last; -1 beyond them.
        self._paths = torch.full((len(roots), tail, levels), -1, dtype=torch.int64)
        self._trees = self._rows = torch.zeros(0, dtype=torch.int64)

    def enter(self, forest: Forest, level: int) -> None:
        """Set the rows of the next calls: those that the forest expands at `level`, counted from 1."""
        trees, rows = [], []
        for b, width in enumerate(forest.widths.tolist()):
            end = int(forest.rows[b])
            own = torch.arange(end - width, end)
            parents = torch.from_numpy(forest.tail_parents[b, end - width : end]).long()
            self._paths[b, own] = self._paths[b, parents]
            self._paths[b, own, level - 1] = own
            trees.append(torch.full((width,), b, dtype=torch.int64))
            rows.append(own)
        self._trees, self._rows = torch.cat(trees), torch.cat(rows)
        self._level = level

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[R, Hq, D], [R, Hkv, D], [R, Hkv, D] -> [R, Hq, D]."""
        trees, count, width = self._trees, len(query), query.shape[-1]
        self._keys[layer][trees, self._rows], self._values[layer][trees, self._rows] = key, value
        paths = self._paths[trees, self._rows, : self._level]
        # [R, level, Hkv, D]
        own_keys, own_values = self._keys[layer][trees[:, None], paths], self._values[layer][trees[:, None], paths]
        grouped = query.view(count, key.shape[1], -1, width) * scaling
        text_keys = self._text.keys[layer][:, : self._longest]
        text_values = self._text.values[layer][:, : self._longest]
        per_head = grouped.transpose(0, 1).flatten(1, 2)
        before = torch.bmm(per_head, text_keys.transpose(1, 2)).view(key.shape[1], count, -1, self._longest)
        unseen = torch.arange(self._longest) >= self._roots[trees][:, None]
        before = before.masked_fill(unseen[None, :, None], float("-inf"))
        own = torch.einsum("rhgd,rlhd->hrgl", grouped, own_keys)
        own = own.masked_fill((paths < 0)[None, :, None], float("-inf"))
        shares = torch.cat([before, own], dim=-1).softmax(-1)
        seen, kept = shares[..., : self._longest], shares[..., self._longest :]
        read = torch.bmm(seen.flatten(1, 2), text_values).view(key.shape[1], count, -1, width)
        read = read + torch.einsum("hrgl,rlhd->hrgd", kept, own_values)
        return read.transpose(0, 1).reshape(count, -1, width)


class HeadTrees:
    """Draws trees of `levels` levels with one head, in fp32 on the CPU: `width` nodes of a level are expanded, each to
    `breadth` children."""

    def __init__(
        self,
        head: EagleHead,
        levels: int,
        width: int,
        breadth: int,
        batch: int = 16,
        temperature: float = GREEDY_TEMPERATURE,
    ) -> None:
        """Scores are the head's probabilities at a `temperature`."""
        self._head, self._token_ids, self._temperature = head, HeadNetwork(head).token_ids, temperature
        self._levels, self._width, self._breadth, self._batch = levels, width, breadth, batch

    @torch.inference_mode()
    def draw(self, recording: Recording) -> dict[int, Drawn]:
        """The tree at every position of an answer, from the model's states before it."""
        assert recording.states is not None, "states were not recorded"
        features = self._head.project(recording.states[:-1])
        tokens, attend = torch.tensor(recording.token_ids[1:]), _TextPass()
        output = self._head(tokens, features, torch.arange(len(tokens)), attend)
        found: dict[int, Drawn] = {}
        roots = list(recording.roots)
        for begin in range(0, len(roots), self._batch):
            chosen = roots[begin : begin + self._batch]
            # Entry i is the state after token i + 1.
            entries = torch.tensor(chosen) - 1
            state = RowOutput(output.carried[entries], output.lm_input[entries])
            found |= zip(chosen, self._grow(attend, chosen, state), strict=True)
        return found

    @torch.inference_mode()
    def ranks(self, recording: Recording) -> list[int]:
        """Rank of the next token by the head at every position of an answer, 0 for the likeliest; -1 where it is not in
        the head's vocabulary."""
        assert recording.states is not None, "states were not recorded"
        features, tokens = self._head.project(recording.states[:-1]), torch.tensor(recording.token_ids[1:])
        output = self._head(tokens, features, torch.arange(len(tokens)), _TextPass())
        ids = self._token_ids
        places = None if ids is None else {token: place for place, token in enumerate(ids.tolist())}
        found = []
        for root in recording.roots:
            logits = self._head.logits(output.lm_input[root - 1])
            token = recording.token_ids[root + 1]
            place = token if places is None else places.get(token, -1)
            found.append(-1 if place < 0 else int((logits > logits[place]).sum()))
        return found

    def _grow(self, text: _TextPass, roots: Sequence[int], state: RowOutput) -> list[Drawn]:
        forest = make_forest(len(roots), self._levels, self._width, self._breadth, drawn=False)
        rules, attend = self._rules(len(roots)), _TreePass(text, roots, forest.tail_parents.shape[1], self._levels)
        starts = torch.tensor(roots)
        carried, logits = state.carried, self._head.logits(state.lm_input)
        begins = [forest.sizes.copy()]
        for level in range(1, self._levels + 1):
            temperatures = torch.full((len(logits),), self._temperature)
            tokens, probs = most_probable(logits, temperatures, self._breadth, self._token_ids)
            before = forest.widths.copy()
            more = grow_level(forest, rules, level, level == self._levels, tokens, probs)
            begins.append(forest.sizes.copy())
            if not more:
                break
            offsets = np.cumsum(before) - before
            widths = forest.widths
            trees = np.repeat(np.arange(len(roots)), widths)
            items = np.concatenate([forest.frontier[b, :count] for b, count in enumerate(widths)])
            sources = np.concatenate([forest.sources[b, :count] + offsets[b] for b, count in enumerate(widths)])
            attend.enter(forest, level)
            fed = torch.from_numpy(forest.tokens[trees, items])
            positions = starts[torch.from_numpy(trees)] + level - 1
            carried, lm_input = self._head(fed, carried[torch.from_numpy(sources)], positions, attend)
            logits = self._head.logits(lm_input)
        return [_drawn(forest, b, [int(sizes[b]) for sizes in begins]) for b in range(len(roots))]

    def _rules(self, count: int) -> Rules:
        ints, reals = np.zeros((count, 4), np.int32), np.zeros((count, 2))
        ints[:], reals[:] = (GREEDY, _ALL_NODES, self._levels, 0), (1.0, 0.0)
        none = np.zeros(count, np.uint64)
        return Rules(ints, reals, none, none, none, self._width, self._breadth, floor=0.0, sharpness=1.0)


def _drawn(forest: Forest, b: int, sizes: Sequence[int]) -> Drawn:
    """Tree `b` of the forest. `sizes` [levels + 1] are its numbers of nodes after each level, from the root on."""
    size = sizes[-1]
    levels = np.searchsorted(np.array(sizes), np.arange(size), side="right").astype(np.int32)
    kept = forest.path_probs[b, :size] >= _LEAST_PATH_PROB
    # A path is never likelier than its parent's, so every kept node keeps its parent.
    numbers = (np.cumsum(kept) - 1).astype(np.int32)
    return Drawn(
        tokens=forest.tokens[b, :size][kept].copy(),
        parents=numbers[forest.parents[b, :size][kept]],
        levels=levels[kept],
        scores=forest.scores[b, :size][kept].copy(),
        path_probs=forest.path_probs[b, :size][kept].copy(),
        expanded=forest.tails[b, :size][kept] >= 0,
    )


def pruned(drawn: Drawn, levels: int, width: int, breadth: int, nodes: int) -> tuple[npt.NDArray[np.int64], int]:
    """The nodes of a smaller shape, by falling path probability with the root first; and the number of nodes that it
    would have expanded, but the larger one did not, so that their children are missing.

    Args:
        drawn: a tree with at least as many levels, expanded nodes and children.
        levels, width, breadth: see `HeadTrees`.
        nodes: to keep, without the root.
    """
    size = len(drawn.tokens)
    # Whether a node is among the first `breadth` children of its parent, which are consecutive.
    begins = np.ones(size, np.bool_)
    begins[2:] = drawn.parents[2:] != drawn.parents[1:-1]
    few = np.arange(size) - np.maximum.accumulate(np.where(begins, np.arange(size), 0)) < breadth
    few[0] = False
    expanded = np.zeros(size, np.bool_)
    expanded[0] = True
    kept, missing = [np.zeros(1, np.int64)], 0
    for level in range(1, levels + 1):
        new = np.flatnonzero((drawn.levels == level) & few & expanded[drawn.parents])
        if not len(new):
            break
        kept.append(new)
        if level < levels:
            best = new[np.argsort(-drawn.path_probs[new], kind="stable")[:width]]
            expanded[best] = True
            missing += int((~drawn.expanded[best]).sum())
    items = np.concatenate(kept)
    return items[np.argsort(-drawn.path_probs[items], kind="stable")[: nodes + 1]], missing
