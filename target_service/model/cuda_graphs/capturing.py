"""Captures steps at start: the memory they take, the memory left for keys and values, and the order of sizes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial

import torch
from rich.progress import Progress

from outrider.consoles import error_console
from target_service.core.kv_cache import KVCache
from target_service.model.cuda_graphs.runner import CapturedRunner
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.support import ModelRefused

log = logging.getLogger(__name__)
# With more rows of a sequence, a step is likelier to read a prompt.
_TREE_ROWS = 64
# Steps of so many rows run in the size that is made for them from the first request on. Chosen: larger ones take longer
# by their rows than by places of absent sequences.
_FEW_ROWS = 128


def capture_steps(captured: CapturedRunner, *, seconds: float, memory_share: float) -> None:
    """Capture the largest step, give the KV cache the memory that is left, and capture the others: the most important
    ones where their kernels were compiled ahead, and the rest then in pauses, by `CapturedRunner.capture_later`.

    No capture begins here later than after `seconds`; steps of sizes that are not captured run as the next larger ones.
    The runner's cache, just large enough to run a step, is replaced by one of `memory_share` of the memory that is free
    then, or kept with 0. Raises `ModelRefused` where steps of several ranks cannot be captured.
    """
    captured.compile_ahead("steps", (partial(captured.rehearse, bucket) for bucket in ordered_sizes(captured)))
    before = captured.free_memory()
    try:
        captured.capture(captured.buckets[-1:])
    except torch.OutOfMemoryError:
        raise
    # The compiler and CUDA raise this for a step that no graph can hold.
    except RuntimeError as error:
        if captured.ranks > 1:
            # The others may stand elsewhere by now.
            raise ModelRefused(f"--tensor-parallel: steps cannot be captured: {error}") from error
        log.warning("steps run eagerly, for they cannot be captured: %s", error)
        captured.keep_to_captured()
        # Choosing rows on the device only pays where passes do not wait for the host, and so does drafting there.
        captured.node_table = captured.in_pass = None
    taken = max(0, before - captured.free_memory())
    if memory_share:
        # What each graph takes beside the pool that all share. Partial results of latents are four times as wide as
        # those of usual heads.
        each = max(16 << 20, captured.scratch_bytes)
        # Steps of other sizes split the pool's memory differently from the largest, which is measured.
        reserved = taken * 1.5 + len(captured.buckets) * each
        captured.drop_captures()
        captured.use_cache(_cache_of(captured.cache, captured.free_memory() - reserved, memory_share))
        log.info("KV cache of %s", captured.cache)
    if captured.buckets:
        _capture_all(captured, seconds)


def _cache_of(small: KVCache, free: float, share: float) -> KVCache:
    """A cache like `small` in a share of `free` bytes."""
    return small.like(max(small.num_pages, int(free * share / (small.token_bytes * small.page_size))))


def _capture_all(captured: CapturedRunner, seconds: float) -> None:
    ordered = ordered_sizes(captured)
    # Not of several ranks: one that has no memory left for a size would hold up the others.
    pauses = captured.compiled_ahead and captured.ranks == 1
    first = first_sizes(ordered) if pauses else ordered
    with Progress(transient=True, disable=not sys.stderr.isatty(), console=error_console()) as bars:
        bar = bars.add_task("capturing steps", total=len(first))
        done = captured.capture(first, seconds=seconds, progress=lambda: bars.advance(bar))
    captured.keep_to_captured(ordered if pauses else ())
    log.info("captured %d of %d sizes of steps", done, len(ordered))


def ordered_sizes(captured: CapturedRunner) -> list[Bucket]:
    """All sizes, the most important first."""
    largest, *others = reversed(captured.buckets)
    # The largest first, which every step fits.
    return [largest, *sorted(others, key=_importance)]


def first_sizes(ordered: Sequence[Bucket]) -> list[Bucket]:
    """Those of `ordered` that decoding and trees run in, and of larger ones enough for every step to find its number of
    rows: of each number, and of each size of trees, the one for the most sequences. None for common pages alone."""
    most: dict[tuple[int, int], int] = {}
    for bucket in ordered:
        kind = bucket.rows, bucket.largest_tree
        most[kind] = max(bucket.sequences, most.get(kind, 0))
    return [
        bucket
        for bucket in ordered
        if not bucket.common
        and (bucket.rows <= _FEW_ROWS or bucket.sequences == most[bucket.rows, bucket.largest_tree])
    ]


def _importance(bucket: Bucket) -> tuple[bool, int, bool, int]:
    """Decoding and trees first, then chunks of prompts; small steps before large ones."""
    return (max(bucket.rows_each) > _TREE_ROWS, bucket.rows, bucket.common, -bucket.sequences)
