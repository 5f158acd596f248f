"""Grows a whole tree for every sequence on the device: all levels and passes, with one copy there and one back.

The rows of a tail have fixed places: the root, then for each level as many rows as it may expand, used or not. The host
sends the sequences' positions and their requests' parameters; which nodes are expanded, their parents and the rows they
attend to are computed on the device (`tree_kernels.growth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from draft_service.compiling import Numbers, compiled
from draft_service.drafters.base import DraftSequence
from draft_service.drafters.grown import GrownTrees
from draft_service.neural.cached_prefixes import CacheEntry
from draft_service.neural.candidates import temperature_of
from draft_service.neural.cuda_graphs.attention import StaticIntegers, capacity
from draft_service.neural.cuda_graphs.level_passes import LevelInputs, LevelPasses
from draft_service.neural.level_growth import COUPLED, DEPTH, MODE, NODES, TOP_K
from draft_service.neural.tree_drafting import TreeDrafting, rules_of
from tree_kernels.device_event import DeviceEvent
from tree_kernels.growth import GumbelMax, keep, make_kept

if TYPE_CHECKING:
    from tree_kernels.attention.triton_backend import TritonAttention


class _PartTrees:
    """The trees of a part of a pass, on the device and copied to the host, as `tree_kernels.growth.make_kept`."""

    def __init__(self, device: Tensor) -> None:
        self.device = device
        self.host = torch.zeros(device.shape, dtype=torch.int32, pin_memory=device.is_cuda)
        self.copied = DeviceEvent(on_gpu=device.is_cuda)


class TreePass:
    """The device tensors for one number of sequences, and the pass over them.

    `load` copies the requests to the device. Graphs replay `run_early` and `run_rest`, in this order and each followed
    by `send_back`; `fetch` waits for their trees: those of the early levels, and the whole ones. Without early levels
    `run_early` grows whole trees.
    """

    def __init__(self, sequences: int, coupled: bool, drafting: TreeDrafting, attention: TritonAttention) -> None:
        """For `sequences` at most; `coupled` if some may be COUPLED, which need a Gumbel-max draw over all tokens."""
        self.sequences, self.coupled = sequences, coupled
        self._network, self._cache = drafting.network, drafting.cache
        self._shape = shape = drafting.shape.for_sequences(sequences)
        self._states = drafting.states
        device, levels, width = drafting.network.device, shape.num_steps, shape.width
        batch = capacity(sequences, 1 + shape.expanded, drafting.cache, tree=True)
        self._integers = StaticIntegers(
            {
                "seeds": (sequences, np.uint64),
                "noise_positions": (sequences, np.uint64),
                "top_p": (sequences, np.float64),
                "min_p": (sequences, np.float64),
                "states": (sequences, np.int64),
                "temperatures": (sequences, np.float32),
                "coupled": (sequences, np.int32),
                "top_k": (sequences, np.int32),
                "limits": (2 * sequences, np.int32),
                "positions": ((levels - 1) * sequences * width, np.int32),
                "slots": ((levels - 1) * sequences * width, np.int32),
            },
            batch,
            attention,
            device,
        )
        self.plan = self._integers.plan
        ids, parts = drafting.network.token_ids, self._integers.device
        inputs = LevelInputs(
            parts["limits"].view(2, sequences),
            parts["positions"].view(levels - 1, sequences * width),
            parts["slots"].view(levels - 1, sequences * width),
            parts["temperatures"],
            GumbelMax(*(parts[name] for name in ("coupled", "top_k", "top_p", "min_p", "seeds", "noise_positions"))),
        )
        token_ids = None if ids is None else torch.from_numpy(ids).to(device)
        self._passes = LevelPasses(sequences, shape, self._network, attention, self.plan, inputs, token_ids)
        self._growth = self._passes.growth
        self.elsewhere = device.type == "cuda"
        # Levels of the first part, and the trees of each part.
        self._early = shape.early_levels or levels
        self.parts = 1 if self._early >= levels else 2
        sizes = (shape.early_nodes, shape.num_draft_tokens)[-self.parts :]
        self._trees = [_PartTrees(make_kept(self._growth, nodes)) for nodes in sizes]
        # The state that the early levels pass on to the rest, in their graph's memory.
        self._carried: Tensor | None = None
        # Number of loads, which identifies the trees that it holds.
        self.turn = 0
        self._roots: list[int] = []
        # Sequences whose request parameters are in the host's memory.
        self._written: list[DraftSequence] = []

    def load(self, sequences: Sequence[DraftSequence]) -> None:
        """Copy the requests to the device, asynchronously."""
        self.turn += 1
        count, integers, host = len(sequences), self._integers, self._integers.host
        entries: list[CacheEntry] = [sequence.state for sequence in sequences]
        pages = [entry.pages for entry in entries]
        integers.wait()
        if sequences != self._written:
            # Mostly the same from step to step, and the parameters of a request do not change.
            self._write_requests(sequences)
            self._written = [*sequences]
        host["noise_positions"][:count] = [len(sequence.token_ids) for sequence in sequences]
        integers.fill("states", [entry.slot for entry in entries], self._states.unused)
        prefixes = np.array([entry.entries - 1 for entry in entries], np.int32)
        integers.write_plan(pages, prefixes, np.full(count, self._passes.tail))
        by_level = (self._shape.num_steps - 1, self.sequences, self._shape.width)
        _place_rows(
            np.array([entry.position for entry in entries], np.int32),
            prefixes,
            integers.page_starts,
            integers.page_table,
            self._cache.page_size,
            host["positions"].reshape(by_level),
            host["slots"].reshape(by_level),
        )
        integers.send()
        self._roots = [sequence.root for sequence in sequences]

    def _write_requests(self, sequences: Sequence[DraftSequence]) -> None:
        count, host, rules = len(sequences), self._integers.host, rules_of(sequences, self._shape)
        self._integers.fill("temperatures", [temperature_of(sequence) for sequence in sequences], 1.0)
        host["seeds"][:count], host["coupled"][:count] = rules.seeds, rules.ints[:, MODE] == COUPLED
        host["top_k"][:count] = rules.ints[:, TOP_K]
        host["top_p"][:count], host["min_p"][:count] = rules.reals.T
        host["limits"].reshape(2, -1)[:, :count] = rules.ints[:, [NODES, DEPTH]].T

    def run_early(self) -> None:
        """Grow the first levels of all trees, and write the trees for `fetch`."""
        carried, lm_input = self._states.outputs_in(self._integers.device["states"])
        if self.parts > 1:
            # Nodes of the previous trees would count as nodes of these.
            self._growth.path_probs[:, self._growth.first_item(self._early + 1) :] = 0.0
        self._passes.add(lm_input, 1, coupled=self.coupled)
        for level in range(1, self._early):
            carried, lm_input = self._passes.expand(level, carried, self._cache)
            self._passes.add(lm_input, level + 1, coupled=self.coupled)
        self._carried = carried
        keep(self._growth, self._trees[0].device)

    def run_rest(self) -> None:
        """Grow the other levels, after `run_early`, and write the whole trees for `fetch`."""
        carried = self._carried
        assert carried is not None, "the early levels come first"
        for level in range(self._early, self._shape.num_steps):
            carried, lm_input = self._passes.expand(level, carried, self._cache)
            self._passes.add(lm_input, level + 1, coupled=self.coupled)
        keep(self._growth, self._trees[-1].device)

    def send_back(self, part: int) -> None:
        """Copy the trees of a part to the host once they are grown, asynchronously."""
        trees = self._trees[part]
        trees.host.copy_(trees.device, non_blocking=True)
        trees.copied.record()

    def fetch(self, part: int) -> GrownTrees:
        """Wait for the trees of a part, in the order of the requests."""
        part_trees = self._trees[part]
        part_trees.copied.wait()
        count, room = len(self._roots), (part_trees.host.shape[1] - 1) // 3
        found = part_trees.host.numpy()[:count]
        trees = np.ascontiguousarray(found[:, 1 : 1 + 2 * room].reshape(count, 2, room))
        scores = found[:, 1 + 2 * room :].view(np.float32).astype(np.float64)
        sizes = np.minimum(found[:, :1], 1 + self._integers.host["limits"][:count, None]).astype(np.int64)
        trees[:, 0, 0] = self._roots
        return GrownTrees(trees, scores, sizes)


def compile_loops() -> None:
    """Compile what lays out the rows of captured trees."""
    numbers, rows = np.zeros(1, np.int32), np.zeros((1, 1, 1), np.int32)
    _place_rows(numbers, numbers, numbers, numbers, 1, rows, rows)


@compiled
def _place_rows(
    first: Numbers,
    prefixes: Numbers,
    page_starts: Numbers,
    page_table: Numbers,
    page_size: int,
    positions: Numbers,
    slots: Numbers,
) -> None:
    """Write positions and cache slots of the rows of n sequences: level after level, behind the tail's root.

    Args:
        first: [n] positions of the root's children.
        prefixes: [n] tokens before the root.
        page_starts: [at least n] start of a sequence's pages in `page_table`.
        positions: [levels, B, W], filled for the n sequences.
        slots: [levels, B, W], filled; -1 for the others.
    """
    levels, sequences, width = slots.shape
    for level in range(levels):
        for b in range(sequences):
            for place in range(width):
                slots[level, b, place] = -1
                if b < len(first):
                    token = prefixes[b] + 1 + level * width + place
                    page = page_table[page_starts[b] + token // page_size]
                    slots[level, b, place] = page * page_size + token % page_size
                    positions[level, b, place] = first[b] + level
