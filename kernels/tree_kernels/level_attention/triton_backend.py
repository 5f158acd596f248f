"""Launches of the attention of a level. Meaning and shapes are those of `level_attention.LevelAttention`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from tree_kernels.attention import AttentionVariant
from tree_kernels.attention.triton_planning import LOG2_E
from tree_kernels.attention.triton_tiling import Tiling
from tree_kernels.level_attention.triton_kernels import level_kernel
from tree_kernels.level_attention.types import TailLevel

# Keys of a part at least: fewer are read in less time than it takes to merge another part. Reasoned, not measured: a
# program reads 100 KB of keys and values in the 1 to 2 us that a merge takes.
_LEAST_KEYS = 256
# Parts of a group at most. Chosen: the last program merges four at a time.
_MOST_PARTS = 16
_MAX_BLOCK_ROWS = 64


class TritonLevelAttention:
    """See `LevelAttention`."""

    def __init__(self, device: torch.device, *, processors: int | None = None, least_keys: int = _LEAST_KEYS) -> None:
        """`processors` to fill, all of the device where None; `least_keys` of a part."""
        self._processors = processors or torch.cuda.get_device_properties(device).multi_processor_count
        self._least_keys = least_keys
        early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        # From Hopper on, a launch may be put in place while the one before it ends.
        self._launch = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
        # By how many there are. Every launch leaves them at zero.
        self._arrivals: dict[int, Tensor] = {}

    def run(
        self,
        level: TailLevel,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        variant: AttentionVariant,
    ) -> Tensor:
        """See `LevelAttention.run`."""
        (sequences, tail), rows = level.parents.shape, level.end - level.first
        kv_heads, width, value_width = *key_cache.shape[2:], value_cache.shape[-1]
        group = query.shape[1] // kv_heads
        tiling = tiling_of(rows * group, width, query.element_size())
        groups = sequences * kv_heads * triton.cdiv(rows * group, tiling.block_rows)
        parts = max(1, min(_MOST_PARTS, self._processors // groups))
        output = query.new_empty(len(query), query.shape[1], value_width)
        # Two for each part, as `write_partial` places them.
        numbers = 2 * groups * parts * tiling.block_rows if parts > 1 else 1
        partials = torch.empty(numbers, value_width, dtype=torch.float32, device=query.device)
        value_block = triton.next_power_of_2(value_width)
        level_kernel[(parts, groups // sequences, sequences)](
            query, key_cache, value_cache, output, partials, partials.new_empty(numbers),
            self._arrived(groups, query), level.query_starts, level.prefix_lengths, level.page_starts,
            level.page_table, level.parents, level.parents if variant.sinks is None else variant.sinks,
            scale * LOG2_E, query.stride(0), query.stride(1), tail, level.first, level.depth,
            ROWS=rows, GROUP=group, KV_HEADS=kv_heads, D=width, DV=value_width,
            BLOCK_D=triton.next_power_of_2(width), BLOCK_DV=value_block,
            PAGE_SIZE=key_cache.shape[1], BLOCK_M=tiling.block_rows, BLOCK_N=tiling.block_keys,
            LEAST_TILES=max(1, self._least_keys // tiling.block_keys),
            FAR=max(key_cache.numel(), value_cache.numel()) >= 1 << 31, CAP=variant.score_cap or 0.0,
            SINKS=variant.sinks is not None, MERGE_ROWS=tiling.merge_rows,
            MERGE_PARTS=tiling.merge_parts(value_block), num_warps=tiling.warps, num_stages=tiling.stages,
            **self._launch,
        )  # fmt: skip
        return output

    def _arrived(self, groups: int, query: Tensor) -> Tensor:
        """[groups] int32 beside the query, at an address for good."""
        if groups not in self._arrivals:
            self._arrivals[groups] = query.new_zeros(groups, dtype=torch.int32)
        return self._arrivals[groups]


def tiling_of(rows: int, width: int, itemsize: int) -> Tiling:
    """The tiling for so many packed rows of a sequence, keys of `width` numbers of `itemsize` bytes. Like those of
    `attention.triton_tiling` for few rows, with as much in flight for wide and for long numbers."""
    block_rows = min(_MAX_BLOCK_ROWS, max(16, triton.next_power_of_2(rows)))
    if itemsize > 2 or width > 128:
        return Tiling(block_rows, 32, 4, 2 if itemsize > 2 else 3, 1, 16)
    return Tiling(block_rows, 64, 4, 5, 1, 16)
