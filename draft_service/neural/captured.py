"""Passes of a neural drafter as captured CUDA graphs: a pass costs the host two small copies and one launch.

A graph reads its pass from tensors that stay where they are. There is one size for the passes of a tree and one for
what a step commits, per power of two of sequences; a prompt's features, which fit neither, are read eagerly. Rows that
a pass leaves free have no sequence, no slot and no effect. What a pass returns is overwritten by the next of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from draft_service.neural.config import NeuralConfig
from draft_service.neural.paged_cache import PagedCache
from draft_service.neural.tail_attention import TailPart, attention_batch, fresh_rows, fresh_slots
from draft_service.neural.tree_config import CacheShape, TreeShape
from draft_service.neural.tree_drafting import Network, RowOutput, TreeDrafting
from tree_kernels.attention import AttentionBatch, AttentionPlan
from tree_kernels.kv_move import write_kv

# Rows of one sequence that a captured pass over committed tokens has room for, on average.
_COMMITTED = 8
# What the plan's tiles are chosen for.
_USUAL_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class PassSize:
    """Room of a captured pass: `tail` rows of all tails, the `new` ones among them."""

    sequences: int
    tail: int
    new: int

    def capacity(self, cache: PagedCache) -> AttentionBatch:
        """The batch that a plan of this size is laid out for: even tails, and every page of the cache."""
        each = self.tail // self.sequences
        return AttentionBatch(
            query_starts=tuple(range(0, self.tail + 1, each)),
            prefix_lengths=(_USUAL_CONTEXT,) * self.sequences,
            pages=((0,) * (cache.used_pages + cache.free_pages), *((),) * (self.sequences - 1)),
            page_size=cache.page_size,
            parents=(tuple(max(0, row - 1) for row in range(each)),) * self.sequences,
        )


class StaticAttention(Protocol):
    """Attention whose plans lie in tensors that stay: `tree_kernels`' Triton backend."""

    def plan(self, batch: AttentionBatch, integers: Tensor | None = None) -> AttentionPlan:
        """A plan for batches up to this one, in `integers`."""

    def pack(self, plan: Any, batch: AttentionBatch) -> Tensor:
        """[n] int32 on the host: the first n of the plan's integers for this batch."""

    def run(self, plan: AttentionPlan, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """See `TreeAttention.run`."""


class StaticPass:
    """One size's tensors on the device, and the pass over what they hold.

    Layout of the integers: token ids, positions, slots, places among the tails' rows [new] each, and then the plan.
    """

    def __init__(
        self, size: PassSize, network: Network, attention: StaticAttention, cache: PagedCache, integers: int
    ) -> None:
        """`integers` is what the plan of `size.capacity` takes."""
        self.size, self._network, self._attention, self._cache = size, network, attention, cache
        on_gpu = network.device.type == "cuda"
        count = 4 * size.new + integers
        self._host = torch.zeros(count, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._integers = torch.zeros(count, dtype=torch.int32, device=network.device)
        self._token_ids, self._positions, self._slots, self._places = self._integers[: 4 * size.new].view(4, size.new)
        self.plan = attention.plan(size.capacity(cache), self._integers[4 * size.new :])
        self._carried: Tensor | None = None

    def load(
        self, parts: Sequence[TailPart], token_ids: Sequence[int], carried: Tensor | None, positions: Sequence[int]
    ) -> None:
        """Send a pass to the device. Does not wait for it. Raises `ValueError` when it does not fit."""
        new, missing = self.size.new, self.size.new - len(token_ids)
        packed = self._attention.pack(self.plan, attention_batch(parts, self._cache.page_size, self.size.sequences))
        if self._copied is not None:
            # The last copy may still read the pinned memory.
            self._copied.synchronize()
        head = self._host[: 4 * new].view(4, new)
        head[0] = torch.tensor([*token_ids, *(0,) * missing], dtype=torch.int32)
        head[1] = torch.tensor([*positions, *(0,) * missing], dtype=torch.int32)
        head[2] = torch.tensor([*fresh_slots(parts, self._cache), *(-1,) * missing], dtype=torch.int32)
        # Behind the last row, where a free row's query harms nobody.
        head[3] = torch.tensor([*fresh_rows(parts), *(self.size.tail,) * missing], dtype=torch.int32)
        end = 4 * new + len(packed)
        self._host[4 * new : end] = packed
        self._integers[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if carried is not None:
            if self._carried is None:
                self._carried = carried.new_zeros(new, carried.shape[1])
            self._carried[: len(carried)].copy_(carried)

    def run(self) -> RowOutput:
        """The pass over all rows of the size, [new, ..] each."""
        return self._network.read(self._token_ids, self._carried, self._positions, self._attend)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `TailAttention`."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        write_kv(key, value, keys, values, self._slots)
        tail, places = self.size.tail, self._places.long()
        queries = query.new_zeros(tail + 1, *query.shape[1:]).index_copy_(0, places, query)
        output = self._attention.run(self.plan, queries[:tail], keys, values, query.shape[-1] ** -0.5)
        return output.index_select(0, places.clamp(max=tail - 1))


class CapturedDrafting(TreeDrafting):
    """`TreeDrafting` on a GPU. Graphs are captured when their size is first met."""

    def __init__(self, network: Network, tree: TreeShape, cache: CacheShape) -> None:
        super().__init__(network, tree, cache)
        self._static: StaticAttention = self._attention.capturable
        self._replays: dict[PassSize, tuple[StaticPass, Callable[[], RowOutput]]] = {}
        self._pool: Any = None

    def _read(
        self, parts: Sequence[TailPart], tokens: list[int], carried: Tensor | None, positions: list[int]
    ) -> RowOutput:
        size = pass_size(parts, self.shape)
        if size is None:
            return super()._read(parts, tokens, carried, positions)
        if size not in self._replays:
            self._replays[size] = self._capture(size, parts, tokens, carried, positions)
        static, replay = self._replays[size]
        static.load(parts, tokens, carried, positions)
        output = replay()
        return RowOutput(output.carried[: len(tokens)], output.spoken[: len(tokens)])

    def _capture(
        self,
        size: PassSize,
        parts: Sequence[TailPart],
        tokens: list[int],
        carried: Tensor | None,
        positions: list[int],
    ) -> tuple[StaticPass, Callable[[], RowOutput]]:
        """Capture a size with the first pass that needs it, which then is run again."""
        from tree_kernels._triton_attention import TritonPlan, plan_integers

        static = StaticPass(size, self.network, self._static, self.cache, plan_integers(size.capacity(self.cache)))
        static.load(parts, tokens, carried, positions)
        stream = torch.cuda.Stream(self.network.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.network.device))
        with torch.cuda.stream(stream):
            # Lets libraries allocate what they keep.
            for _ in range(2):
                static.run()
        stream.synchronize()
        assert isinstance(static.plan, TritonPlan)
        # The first layer to run makes the schedule, which has to become part of the graph.
        static.plan.schedules.clear()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = static.run()
        torch.cuda.current_stream(self.network.device).wait_stream(stream)

        def replay() -> RowOutput:
            graph.replay()
            return output

        return static, replay


def drafting_on(network: Network, config: NeuralConfig) -> TreeDrafting:
    """Drafting as the settings ask for it: captured where that is wanted, on a GPU."""
    captured = config.cuda_graphs and network.device.type == "cuda"
    return (CapturedDrafting if captured else TreeDrafting)(network, config.tree, config.cache)


def pass_size(parts: Sequence[TailPart], tree: TreeShape) -> PassSize | None:
    """The size that a pass runs in, None for one that is too large to be captured."""
    sequences = 1 << (len(parts) - 1).bit_length()
    if any(part.parents is not None for part in parts):
        return PassSize(sequences, sequences * (1 + tree.expanded), sequences * tree.topk)
    rows = sequences * _COMMITTED
    return PassSize(sequences, rows, rows) if sum(part.rows for part in parts) <= rows else None
