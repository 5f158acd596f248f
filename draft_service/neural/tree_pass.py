"""A whole tree of every sequence in one go on the device: all levels, all passes, one copy there and one back.

The rows of a tail have fixed places: the root, and then `topk` rows of each level, whether or not so many nodes are
expanded. The host says where sequences stand and what requests ask for; what is expanded, whose child it is and which
rows it sees stay on the device (`tree_kernels.growth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.drafter import tree_limits
from draft_service.neural.candidates import temperature_of
from draft_service.neural.network import Network, RootStates
from draft_service.neural.paged_cache import PagedCache
from draft_service.neural.static_attention import StaticAttend, StaticAttention, StaticIntegers, TreePlan, capacity
from draft_service.neural.tree_config import TreeShape
from draft_service.neural.tree_drafting import Wanted
from outrider.sampling import VerificationMode
from outrider.tree import TokenTree
from tree_kernels.growth import Children, Race, grow, keep, likeliest, make_growth, make_kept, race_winners


class Drafting(Protocol):
    """What a pass is for: `tree_drafting.TreeDrafting`."""

    network: Network
    shape: TreeShape
    cache: PagedCache
    states: RootStates


class TreePass:
    """The tensors of one number of sequences on the device, and the pass over what they hold.

    `load` brings in what is wanted, `run` is what a graph replays, and `fetch` waits for the trees.
    """

    def __init__(self, sequences: int, coupled: bool, drafting: Drafting, attention: StaticAttention) -> None:
        """`sequences` at most; `coupled` where some of them may be COUPLED, and race for every token."""
        self.sequences, self.coupled = sequences, coupled
        self._network, self._shape, self._cache = drafting.network, drafting.shape, drafting.cache
        self._states, self._attention = drafting.states, attention
        device, levels, width = drafting.network.device, drafting.shape.num_steps, drafting.shape.topk
        self._tail = 1 + drafting.shape.expanded
        batch = capacity(sequences, self._tail, drafting.cache, tree=True)
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
        self.plan: TreePlan = self._integers.plan
        self._growth = make_growth(sequences, levels, width, device)
        said = drafting.network.token_ids
        self._token_ids = None if said is None else torch.from_numpy(said).to(device)
        self._result = make_kept(self._growth, drafting.shape.num_draft_tokens)
        self._fetched = torch.zeros(self._result.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._wanted: Sequence[Wanted] = ()

    def load(self, wanted: Sequence[Wanted]) -> None:
        """Send what is wanted to the device. Does not wait for it."""
        count, host, most = len(wanted), self._integers.host, self._shape.limits
        self._integers.wait()
        for b, one in enumerate(wanted):
            sequence, sampling = one.sequence, one.sequence.sampling
            limits = tree_limits(most, sequence.limits)
            coupled = sequence.mode is VerificationMode.COUPLED
            host["seeds"][b], host["noise_positions"][b] = sequence.seed, len(sequence.token_ids)
            host["coupled"][b], host["temperatures"][b] = coupled, temperature_of(sequence)
            host["top_k"][b], host["top_p"][b], host["min_p"][b] = sampling.top_k, sampling.top_p, sampling.min_p
            host["limits"][b], host["limits"][self.sequences + b] = limits.max_nodes, limits.max_depth
            host["states"][b] = one.followed.pages[0]
        host["states"][count:] = self._states.nobody
        host["temperatures"][count:] = 1.0
        prefixes = np.array([one.followed.entries - 1 for one in wanted], np.int32)
        pages = [one.followed.pages for one in wanted]
        by_level = (self._shape.num_steps - 1, self.sequences, self._shape.topk)
        positions, slots = host["positions"].reshape(by_level), host["slots"].reshape(by_level)
        first = np.array([one.position for one in wanted], np.int32)
        positions[:, :count] = first[:, None] + np.arange(by_level[0], dtype=np.int32)[:, None, None]
        slots[:, count:] = -1
        slots[:, :count] = _tail_slots(pages, prefixes + 1, self._tail - 1, self._cache.page_size).reshape(
            count, *slots.shape[::2]
        ).transpose(1, 0, 2)  # fmt: skip
        self._integers.write_plan(pages, prefixes, np.full(count, self._tail))
        self._integers.send()
        self._wanted = wanted

    def run(self) -> None:
        """The trees of all sequences, to where `fetch` finds them."""
        shape, parts = self._shape, self._integers.device
        limits = parts["limits"].view(2, self.sequences)
        parents = self.plan.parents.view(self.sequences, self._tail)
        carried, spoken = self._states.read(parts["states"])
        for level in range(1, shape.num_steps + 1):
            children = self._children(self._network.logits(spoken), level)
            grow(self._growth, children, limits, level, shape.min_score, parents)
            if level < shape.num_steps:
                rows = carried.index_select(0, self._growth.sources.flatten())
                positions = parts["positions"].view(shape.num_steps - 1, -1)[level - 1]
                # What the first layer makes of the plan is of the parents that it finds.
                self.plan.schedules.clear()
                tokens = self._growth.next_tokens.flatten()
                carried, spoken = self._network.read(tokens, rows, positions, self._attend(level))
        keep(self._growth, self._result)

    def fetch(self) -> list[TokenTree]:
        """Wait for the trees, in the order in which they were wanted."""
        self._fetched.copy_(self._result, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        found = self._fetched.numpy()
        nodes = self._integers.host["limits"].tolist()
        return [_tree(found[b], nodes[b], one.sequence.root) for b, one in enumerate(self._wanted)]

    def _children(self, logits: Tensor, level: int) -> Children:
        parts, shape = self._integers.device, self._shape
        if not self.coupled:
            return likeliest(logits, parts["temperatures"], shape.topk, self._token_ids)
        race = Race(
            parts["coupled"],
            parts["top_k"],
            parts["top_p"],
            parts["min_p"],
            parts["seeds"],
            parts["noise_positions"],
        )
        return race_winners(
            logits,
            parts["temperatures"],
            shape.topk,
            self._token_ids,
            race,
            level,
            shape.race_entrants,
            shape.race_sharpness,
        )

    def _attend(self, level: int) -> StaticAttend:
        """Attention of the rows of one level, [B * W, ..]."""
        sequences, width = self.sequences, self._shape.topk
        slots = self._integers.device["slots"].view(-1, sequences * width)[level - 1]
        rows = slice(1 + (level - 1) * width, 1 + level * width)

        def run(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries = query.new_zeros(sequences, self._tail, *query.shape[1:])
            queries[:, rows] = query.view(sequences, width, *query.shape[1:])
            output = self._attention.run(self.plan, queries.flatten(0, 1), keys, values, query.shape[-1] ** -0.5)
            return output.reshape(sequences, self._tail, *query.shape[1:])[:, rows].flatten(0, 1)

        return StaticAttend(self._cache, slots, run)


def _tail_slots(
    pages: Sequence[Sequence[int]], starts: npt.NDArray[np.int32], count: int, page_size: int
) -> npt.NDArray[np.int32]:
    """[n, count] cache slots of the tokens of each sequence from its start on."""
    first = starts // page_size
    near = np.zeros((len(pages), (count + page_size - 2) // page_size + 1), np.int32)
    for b, own in enumerate(pages):
        taken = own[first[b] : first[b] + near.shape[1]]
        near[b, : len(taken)] = taken
    offsets = (starts - first * page_size)[:, None] + np.arange(count, dtype=np.int32)
    own_page = offsets // page_size
    slots: npt.NDArray[np.int32] = (near[np.arange(len(pages))[:, None], own_page] - own_page) * page_size + offsets
    return slots


def _tree(found: npt.NDArray[np.int32], nodes: int, root: int) -> TokenTree:
    """The best `nodes` of what `growth.keep` wrote of a tree."""
    room = (len(found) - 1) // 3
    rows = min(int(found[0]), 1 + nodes)
    tokens, parents, scores = found[1:].reshape(3, room)[:, :rows]
    return TokenTree((root, *tokens[1:].tolist()), tuple(parents.tolist()), tuple(scores.view(np.float32).tolist()))
