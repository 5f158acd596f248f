"""Measures the cost of a step by its rows on this machine, once at start, for the row budget."""

from __future__ import annotations

import time

import torch

from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.step_cost import StepCost
from tree_kernels.attention import AttentionBatch

# Sizes between which costs are interpolated, the most informative first, and the context they are measured at.
_ROWS = (1, 16, 64, 4, 32, 8, 2, 12, 24, 48, 128, 256)
_CONTEXT = 256
_REPEATS = 3
# A loaded machine measures fewer sizes; three are always measured.
_SECONDS = 8.0
_FEWEST_SIZES = 3


def measure_step_cost(runner: ModelRunner, max_rows: int) -> StepCost:
    """Time forward passes of one sequence with a star-shaped tree; the fastest of a few repeats of each size counts.

    Takes about 3 s for a 135M model on two CPU cores. Leaves the KV cache as it found it.
    """
    cache = runner.cache
    context = min(_CONTEXT, runner.max_context // 2, cache.num_pages * cache.page_size // 2)
    sizes = [rows for rows in _ROWS if rows <= max_rows and cache.pages_for(context + rows) <= cache.free_pages]
    pages = cache.allocate(cache.pages_for(context + max(sizes)))
    deadline = time.monotonic() + _SECONDS
    measured: dict[int, float] = {}
    try:
        _seconds(runner, _step(runner, pages, context, sizes[0]))
        for rows in sizes:
            if len(measured) >= _FEWEST_SIZES and time.monotonic() > deadline:
                break
            step = _step(runner, pages, context, rows)
            measured[rows] = min(_seconds(runner, step) for _ in range(_REPEATS))
    finally:
        cache.release(pages)
    return StepCost(sorted(measured.items()))


def _seconds(runner: ModelRunner, step: ForwardInput) -> float:
    """The time of a step, to its end on the device."""
    begin = time.perf_counter()
    runner.forward(step)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - begin


def _step(runner: ModelRunner, pages: list[int], context: int, rows: int) -> ForwardInput:
    return ForwardInput(
        token_ids=tuple(row % runner.vocabulary_size for row in range(rows)),
        positions=(context, *(context + 1 for _ in range(rows - 1))),
        slots=tuple(runner.cache.slots(pages, context, rows)),
        attention=AttentionBatch(
            query_starts=(0, rows),
            prefix_lengths=(context,),
            pages=(tuple(pages[: runner.cache.pages_for(context + rows)]),),
            page_size=runner.cache.page_size,
            parents=((0,) * rows if rows > 1 else None,),
        ),
        logit_rows=tuple(range(rows)),
    )
