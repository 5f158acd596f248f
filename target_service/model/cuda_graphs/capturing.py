"""Prepares captured steps at start: what memory they take, what is left for keys and values, and which come first."""

from __future__ import annotations

import logging
import sys

import torch
from rich.console import Console
from rich.progress import Progress

from target_service.core.kv_cache import KVCache
from target_service.model.cuda_graphs.runner import CapturedRunner, CaptureOptions
from target_service.model.cuda_graphs.sizes import Bucket
from target_service.model.runner import ModelRunner

log = logging.getLogger(__name__)
# Set aside for what each graph takes for itself beside the pool that all share.
_GRAPH_BYTES = 16 << 20
# Steps of other sizes find the pool's memory in other pieces than the largest left it in.
_POOL_SLACK = 1.5
# Rows of a sequence above which a step is likelier to read a prompt.
_TREE_ROWS = 64


def capture_steps(
    runner: ModelRunner, options: CaptureOptions, *, seconds: float, memory_share: float
) -> CapturedRunner:
    """Take over `runner`, capture the largest step, give keys and values what is left, and capture the others.

    Args:
        runner: with a cache that is to be replaced, just large enough to run a step.
        options: bounds of a step.
        seconds: no capture begins later than this. Steps of sizes that were left out run as the next larger ones.
        memory_share: of what is free then, for keys and values. 0 leaves the cache as it is.
    """
    captured = CapturedRunner(runner, options)
    # Joining layers leaves as much as they weigh with PyTorch, which capturing gives back to the device: taken for what
    # a step needs less than nothing of, it made a cache of 77 GB on a GPU that had 66 left.
    torch.cuda.empty_cache()
    before = _free(runner.device)
    try:
        captured.capture(captured.buckets[-1:])
    except torch.OutOfMemoryError:
        raise
    # Whatever a model does in a step that no graph can hold, the compiler and CUDA say so by this.
    except RuntimeError as error:
        log.warning("steps run eagerly, for they cannot be captured: %s", error)
        captured.keep_to_captured()
        # Each pass would wait for the host, which is what choosing rows on the device is to save.
        captured.node_table = None
    taken = max(0, before - _free(runner.device))
    if memory_share:
        # Partial results of latents are four times as wide as those of usual heads.
        each = max(_GRAPH_BYTES, captured.scratch_bytes)
        _give_the_rest(captured, taken * _POOL_SLACK + len(captured.buckets) * each, memory_share)
    if captured.buckets:
        _capture_all(captured, seconds)
    return captured


def _give_the_rest(captured: CapturedRunner, reserved: float, share: float) -> None:
    """Replace the cache by one that takes `share` of what is free beside `reserved` bytes."""
    captured.drop_captures()
    torch.cuda.empty_cache()
    cache = _cache_of(captured.cache, _free(captured.device) - reserved, share)
    captured.use_cache(cache)
    log.info("KV cache of %s", cache)


def _free(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free


def _cache_of(small: KVCache, free: float, share: float) -> KVCache:
    """A cache like `small` in a share of `free` bytes."""
    layers, _, page_size, kv_heads, key_width = small.key_pool.shape
    pages = max(small.num_pages, int(free * share / (small.token_bytes * page_size)))
    pool, value_width = small.key_pool, small.value_pool.shape[-1]
    return KVCache(pages, page_size, layers, kv_heads, key_width, value_width, pool.dtype, pool.device)


def _capture_all(captured: CapturedRunner, seconds: float) -> None:
    largest, *others = reversed(captured.buckets)
    # The largest first, which every step fits.
    wanted = [largest, *sorted(others, key=_importance)]
    with Progress(transient=True, disable=not sys.stderr.isatty(), console=Console(stderr=True)) as bars:
        bar = bars.add_task("capturing steps", total=len(wanted))
        done = captured.capture(wanted, seconds=seconds, progress=lambda count, _: bars.update(bar, completed=count))
    captured.keep_to_captured()
    log.info("captured %d of %d sizes of steps", done, len(wanted))


def _importance(bucket: Bucket) -> tuple[bool, int, int]:
    """Decoding and trees first, then chunks of prompts; small steps before large ones."""
    return (max(bucket.rows_each) > _TREE_ROWS, bucket.rows, -bucket.sequences)
