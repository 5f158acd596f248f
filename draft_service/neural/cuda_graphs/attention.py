"""The integer inputs of a captured pass: a tensor with a fixed address, pinned memory to fill it, and a plan in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draft_service.neural.paged_cache import DraftCache
from tree_kernels.attention import AttentionBatch, plan_integers
from tree_kernels.device_event import DeviceEvent

if TYPE_CHECKING:
    # Needs Triton, which a CPU may lack.
    from tree_kernels.attention.triton_backend import TritonAttention

# The context length that the plan's tiles are chosen for.
USUAL_CONTEXT = 512
_TORCH_TYPES = {
    np.int32: torch.int32,
    np.float32: torch.float32,
    np.float64: torch.float64,
    np.int64: torch.int64,
    # Reinterpreted: PyTorch computes with signed integers.
    np.uint64: torch.int64,
}


def capacity(sequences: int, tail: int, cache: DraftCache, *, tree: bool) -> AttentionBatch:
    """The largest batch of a plan: tails of `tail` rows on average, and every page of the cache."""
    chain = tuple(max(0, row - 1) for row in range(tail))
    return AttentionBatch(
        query_starts=tuple(range(0, sequences * tail + 1, tail)),
        prefix_lengths=(USUAL_CONTEXT,) * sequences,
        pages=((0,) * cache.num_pages, *((),) * (sequences - 1)),
        page_size=cache.page_size,
        parents=(chain if tree else None,) * sequences,
    )


class StaticIntegers:
    """The inputs of a pass by name: `send` copies `host[name]` to `device[name]`, which has a fixed address.

    All are parts of one tensor, the plan last and its page table at the very end, so that short contexts copy little.
    `host` is in numpy, where small writes cost a fifth of PyTorch's.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[int, type[np.generic]]],
        batch: AttentionBatch,
        attention: TritonAttention,
        device: torch.device,
    ) -> None:
        """`fields` are sizes and types, those of 8 bytes first; the plan has room for `batch`."""
        words = {name: count * (np.dtype(dtype).itemsize // 4) for name, (count, dtype) in fields.items()}
        plan_at = sum(words.values())
        size = plan_at + plan_integers(batch)
        on_gpu = device.type == "cuda"
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._integers = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = DeviceEvent(on_gpu=on_gpu)
        numbers = self._pinned.numpy()
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        begin = 0
        for name, (_, dtype) in fields.items():
            end = begin + words[name]
            self.host[name] = numbers[begin:end].view(dtype)
            self.device[name] = self._integers[begin:end].view(_TORCH_TYPES[dtype])
            begin = end
        self.plan = attention.plan(batch, self._integers[plan_at:])
        plan = self.plan
        views = (plan.query_starts, plan.prefix_lengths, plan.causal, plan.page_starts, plan.parents, plan.page_table)
        places = [(view.storage_offset(), view.storage_offset() + view.numel()) for view in views]
        self._plan_host = [numbers[start:stop] for start, stop in places]
        # Start of each sequence's pages in the table, and the table, as `write_plan` writes them.
        self.page_starts, self.page_table = self._plan_host[3], self._plan_host[5]
        self._pages_at = places[-1][0]
        self._pages = 0

    def fill(self, name: str, values: Sequence[float] | npt.NDArray[Any], rest: float) -> None:
        """Write the first of a field's numbers, and `rest` to all others."""
        numbers, count = self.host[name], len(values)
        numbers[:count], numbers[count:] = values, rest

    def wait(self) -> None:
        """Wait until the last copy has read the pinned memory."""
        self._copied.wait()

    def write_plan(
        self,
        pages: Sequence[Sequence[int]],
        prefixes: npt.NDArray[np.int32],
        tails: npt.NDArray[np.int32],
        parents: Sequence[int] = (),
        *,
        causal: bool = False,
    ) -> None:
        """Write the plan of a pass over sequences with these pages, keys before their tails, and rows of their tails;
        the plan's other sequences get no row and no key. Without the `parents` of all rows all attend to the root
        alone, until the device writes parents."""
        query_starts, prefix_lengths, causals, page_starts, seen, table = self._plan_host
        seen[: len(parents)], seen[len(parents) :] = parents, 0
        count, begin = len(pages), 0
        query_starts[1 : count + 1] = np.cumsum(tails)
        query_starts[count + 1 :] = query_starts[count]
        prefix_lengths[:count], prefix_lengths[count:] = prefixes, 0
        causals[:count], causals[count:] = causal, 1
        for b, own in enumerate(pages):
            page_starts[b] = begin
            table[begin : begin + len(own)] = own
            begin += len(own)
        page_starts[count:] = begin
        self._pages = begin

    def send(self) -> None:
        """Copy everything to the device, asynchronously."""
        end = self._pages_at + self._pages
        self._integers[:end].copy_(self._pinned[:end], non_blocking=True)
        self._copied.record()
