"""The cost of a step by its rows: measured on this machine once at start, then corrected by live steps."""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch

from outrider.devices import choose_device
from target_service.model.forward import ForwardInput
from target_service.model.runner import ModelRunner

# Sizes between which costs are interpolated, the most informative first, and the context they are measured at.
_ROWS = (1, 16, 64, 4, 32, 8, 2, 12, 24, 48, 128, 256)
# And those of steps that read prompts, where the device chooses rows beside them.
_PROMPT_ROWS = (512, 1024, 2048)


class StepCost:
    """Seconds of a step by its rows: measured at a few sizes, interpolated linearly, corrected by live steps.

    Without correction, a size that was measured while the machine was busy would be avoided, or preferred, for ever.
    A machine becomes faster or slower as a whole, so a size that did not run lately moves with those that did: only
    ratios of costs matter, and the others would seem more expensive when one size became cheap.
    """

    def __init__(self, measured: SequenceOf[tuple[int, float]]) -> None:
        """`measured`: (rows, seconds) with rising rows. Costs are made to rise with rows, which noise may hide."""
        if not measured:
            raise ValueError("needs at least one measured size")
        self._rows = [rows for rows, _ in measured]
        self._measured = [cost for _, cost in measured]
        # Steps since each size ran.
        self._unseen = [0] * len(measured)
        self._seconds = list(accumulate(self._measured, max))

    def __call__(self, rows: int) -> float:
        """Estimated seconds of a step with this many rows."""
        i = bisect.bisect_left(self._rows, rows)
        if i == 0:
            return self._seconds[0]
        if i == len(self._rows):
            per_row = self._seconds[-1] / self._rows[-1]
            return self._seconds[-1] + per_row * (rows - self._rows[-1])
        share = (rows - self._rows[i - 1]) / (self._rows[i] - self._rows[i - 1])
        return self._seconds[i - 1] + share * (self._seconds[i] - self._seconds[i - 1])

    def marginal(self, rows: int, count: int) -> list[float]:
        """Seconds that each of `count` rows more than `rows` adds, one after the other."""
        prices: list[float] = []
        while len(prices) < count:
            at = rows + len(prices)
            # Rows of one line segment cost the same.
            i = bisect.bisect_right(self._rows, at)
            until = self._rows[i] if i < len(self._rows) else rows + count
            prices += [self(at + 1) - self(at)] * min(until - at, count - len(prices))
        return prices

    def observe_step(self, rows: int, seconds: float) -> None:
        """Correct the nearest measured size by a step of `rows` that took `seconds`."""
        if rows > self._rows[-1]:
            return
        i = bisect.bisect_left(self._rows, rows)
        if i and rows - self._rows[i - 1] < self._rows[i] - rows:
            i -= 1
        # Bounded, so that a pause of the machine hardly counts.
        expected = self(rows)
        # The bound of a live step's factor from the estimate, so that one step moves it by a twentieth at most. Chosen.
        # The weight of one live step in the cost of its size: ten that take half as long again move it two thirds of
        # the way. Chosen.
        factor = 1 + 0.1 * (min(1.5, max(1 / 1.5, seconds / expected)) - 1)
        for size, unseen in enumerate(self._unseen):
            self._unseen[size] = 0 if size == i else unseen + 1
            # Steps of other sizes after which a size follows those. Chosen: where a simulated machine becomes forty
            # times as fast, a size that no longer runs ends 1.3 times too expensive; sizes that alternate are measured
            # by themselves.
            self._measured[size] *= factor if size == i else factor ** min(1.0, unseen / 16)
        self._seconds = list(accumulate(self._measured, max))


def measure_step_cost(runner: ModelRunner, max_rows: int) -> StepCost:
    """Time forward passes of one sequence with a star-shaped tree of diverse tokens, or with a piece of a prompt where
    trees are smaller; the fastest of a few repeats of each size counts. Takes about 3 s for a 135M model on two CPU
    cores. Leaves the KV cache as it found it."""
    # A thread's current device is the first one until it is set.
    choose_device(str(runner.device))
    cache = runner.cache
    context = min(256, runner.max_context // 2, cache.num_pages * cache.page_size // 2)
    wanted = _ROWS if runner.node_table is None else (*_ROWS[:3], *_PROMPT_ROWS, *_ROWS[3:])
    sizes = [rows for rows in wanted if rows <= max_rows and cache.pages_for(context + rows) <= cache.free_pages]
    pages = cache.allocate(cache.pages_for(context + max(sizes)))
    # A loaded machine measures fewer sizes; three are always measured.
    deadline = time.monotonic() + 8.0
    measured: dict[int, float] = {}
    try:
        _seconds(runner, _step(runner, pages, context, sizes[0]))
        for rows in sizes:
            if len(measured) >= 3 and time.monotonic() > deadline:
                break
            step = _step(runner, pages, context, rows)
            measured[rows] = min(_seconds(runner, step) for _ in range(3))
    finally:
        cache.release(pages)
    return StepCost(sorted(measured.items()))


def spread_tokens(vocabulary: int, count: int) -> tuple[int, ...]:
    """Token ids [count] from all over a vocabulary, the same at every start, and the first ones of any longer list.

    Neighbouring ids are often of one kind (bytes, reserved ones): their rows would choose the same experts, and a tree
    look cheaper than it is.
    """
    drawn = random.Random(0)
    return tuple(drawn.randrange(vocabulary) for _ in range(count))


def _seconds(runner: ModelRunner, step: ForwardInput) -> float:
    """The time of a step, to its end on the device."""
    begin = time.perf_counter()
    runner.forward(step)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    return time.perf_counter() - begin


def _step(runner: ModelRunner, pages: list[int], context: int, rows: int) -> ForwardInput:
    token_ids = spread_tokens(runner.vocabulary_size, rows)
    if rows > _ROWS[-1]:
        return ForwardInput.of_sequence(token_ids, tuple(range(context, context + rows)), pages, runner.cache, None)
    positions, parents = (context, *(context + 1,) * (rows - 1)), (0,) * rows if rows > 1 else None
    recurrent = runner.cache.recurrent
    if recurrent is not None and rows > recurrent.window:
        # Of one sequence, so many rows are known tokens.
        positions, parents = tuple(range(context, context + rows)), None
    return ForwardInput.of_sequence(token_ids, positions, pages, runner.cache, parents)
