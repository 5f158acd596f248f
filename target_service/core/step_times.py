"""Recent times of steps, by the sequences that decode in them and the rows of prompts that they read. No clock."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from target_service.core.running_means import RunningMean, RunningTime

# A size's time is the median of its first few steps, in which kernels are compiled, and then a mean of some ten.
# Chosen: as quick as the policies of drafts.
_FIRST_FEW, _SHARE = 5, 0.1
# Steps in a row that read, after which the time of a size that has not decoded alone is taken from them too. Chosen:
# longer than a prompt takes where steps are long enough to read it in a few pieces.
_STALE_AFTER = 16


class StepTimes:
    """Seconds of a step: those of its decoding sequences, and those that rows of prompts add.

    Times are of whole steps, from the end of one to the end of the next, since that is what tenants wait for.
    `StepCost`, for drafted rows, measures the model's passes alone.

    A size beyond those observed is assumed to take no longer than the nearest one, and so is tried, but for rows of
    prompts where costs were measured at the start. A tenant whose
    prompts never end leaves no step that only decodes: sizes that are observed in no other step are taken from steps
    that read, or they would be tried for ever.

    Where the model shares its processors with the service, the time of a tenant's own step is taken from steps
    without other tenants: in shared steps all sizes take longer, since drafts, replies and calls of the others use
    processors too. On a device it is that of all steps of its size. Several passes are one step there or are not, and
    the shortest of a few own steps would be one of a single pass: tenants with 64 and 128 sequences of a small model
    lost a quarter to a half of their tokens by that (`benchmarks/results/2026-11-26-cpu-tenants.md`).
    """

    def __init__(self, expected: Callable[[int], float] | None = None) -> None:
        """`expected`: seconds of a pass by its rows, as measured at the start; None if they were not."""
        self._decoding, self._prefill = _Curve(), _Curve(through_origin=True)
        self._own_decoding = _Curve(undisturbed=True)
        # Steps without decoding sequences, which wait for no draft.
        self._prefill_alone = _Curve()
        self._expected = expected
        # By size as in `_Curve`: steps with prompts since one without.
        self._stale: dict[int, int] = {}

    def observe_step(
        self, decoding: int, prefill_rows: int, seconds: float, *, own: bool = True, drafted: int = 0
    ) -> None:
        """Observe a step of `decoding` sequences and `prefill_rows` rows of prompts, with all that follows it. It was
        one tenant's `own`, on processors that others may use, or not. `drafted` rows were in its pass besides."""
        size = decoding.bit_length()
        if not prefill_rows:
            if own:
                self._own_decoding.observe(decoding, seconds)
            self._stale[size] = 0
            self._decoding.observe(decoding, seconds)
            return
        if not decoding:
            self._prefill_alone.observe(prefill_rows, seconds)
        if not self._decoding.known:
            return
        if drafted and self._expected is not None:
            # Else prompts of which few rows are read beside many drafted ones seem dear, and fewer of them are read.
            rows = decoding + prefill_rows
            seconds -= self._expected(rows + drafted) - self._expected(rows)
        stale = self._stale[size] = self._stale.get(size, _STALE_AFTER) + 1
        if decoding and stale > _STALE_AFTER:
            # Reading takes as long as observed, or else its part of the rows.
            part = seconds * prefill_rows / (prefill_rows + decoding)
            known = self._prefill.known or self._expected is not None
            prefill = self._prefill_seconds(prefill_rows) if known else part
            self._decoding.observe(decoding, max(0.0, seconds - prefill))
        else:
            self._prefill.observe(prefill_rows, max(0.0, seconds - self._decoding(decoding)))

    def seconds(self, decoding: int, prefill_rows: int) -> float:
        """Estimated seconds of a step; 0 without observations."""
        if not decoding and self._prefill_alone.known:
            return self._prefill_alone(prefill_rows)
        return self._decoding(decoding) + self._prefill_seconds(prefill_rows)

    def own_seconds(self, decoding: int, prefill_rows: int) -> float:
        """Estimated seconds of a step of one tenant alone."""
        seconds = self.seconds(decoding, prefill_rows)
        if not decoding or not self._own_decoding.known:
            return seconds
        return seconds - max(0.0, self._decoding(decoding) - self._own_decoding(decoding))

    def decoding_within(self, seconds: float, most: int) -> int:
        """Sequences, at most `most`, that decode within `seconds`."""
        return _most_within(seconds, most, self._decoding)

    def decoding_seconds(self, decoding: int, drafted: int = 0) -> float:
        """Estimated seconds of a step of decoding sequences with `drafted` rows, without prompts."""
        seconds = self._decoding(decoding)
        return seconds if self._expected is None else max(seconds, self._expected(max(1, decoding + drafted)))

    def prefill_within(self, decoding: int, seconds: float, most: int, drafted: int = 0) -> int:
        """Rows of prompts, at most `most`, that are read within `seconds` beside decoding sequences with `drafted`
        rows."""
        left, expected = seconds - self.decoding_seconds(decoding, drafted), self._expected
        if expected is None:
            return _most_within(left, most, self._prefill)
        beside = decoding + drafted
        least = expected(max(1, beside))
        # Sizes between those observed may take longer than these: a pass runs as the next larger captured one.
        curve = lambda rows: max(self._prefill(rows), expected(beside + rows) - least)  # noqa: E731
        return _most_within(left, most, curve)

    def _prefill_seconds(self, rows: int) -> float:
        """Seconds that rows of prompts add to a step."""
        if self._expected is None:
            return self._prefill(rows)
        return max(self._prefill(rows), self._expected(rows) - self._expected(1))


class _Undisturbed:
    """The time of an undisturbed step: the shortest of the last few."""

    def __init__(self) -> None:
        # A tenant's own steps of which the shortest counts. Chosen: enough that one of them was undisturbed, and few
        # enough to follow contexts that grow.
        self._last = deque[float](maxlen=16)

    @property
    def value(self) -> float:
        return min(self._last)

    def observe(self, seconds: float) -> None:
        self._last.append(seconds)


@dataclass(slots=True)
class _Size:
    """Observations of the sizes between two powers of two."""

    time: RunningTime | _Undisturbed
    mean: RunningMean
    # The curve's count at the last observation.
    last: int = 0


class _Curve:
    """Times by size: one point for all sizes between two powers of two, interpolated linearly."""

    def __init__(self, *, undisturbed: bool = False, through_origin: bool = False) -> None:
        """`undisturbed`: the time of a size is the shortest of its last few, and not their running mean."""
        self._undisturbed = undisturbed
        self._forgets = not undisturbed and not through_origin
        self._origin = ((0.0, 0.0),) if through_origin else ()
        # By the power of two.
        self._sizes: dict[int, _Size] = {}
        # Observations of all sizes.
        self._count = 0
        # None after an observation, until they are needed.
        self._points: list[tuple[float, float]] | None = []

    @property
    def known(self) -> bool:
        return bool(self._sizes)

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        if key not in self._sizes:
            time = _Undisturbed() if self._undisturbed else RunningTime(_SHARE, first_few=_FIRST_FEW)
            self._sizes[key] = _Size(time, RunningMean(_SHARE))
        observed = self._sizes[key]
        self._count += 1
        observed.last = self._count
        observed.mean.observe(size)
        observed.time.observe(seconds)
        self._points = None

    def _rising(self) -> Iterator[tuple[float, float]]:
        """The points by size. Times are made to rise with the size, which noise may hide.

        Steps run only if their estimate is short enough, so a size that was slow once would never run again. Its time
        is therefore at most in proportion to a smaller size that runs now, and its excess decays. Nor does a size take
        longer than a larger one that ran since: two steps of 7 and 12 rows of prompts that took 20 ms, as the machine
        paused, made all larger ones seem as slow, and for ten seconds prompts were read 16 rows a step.
        """
        yield from self._origin
        before, age, least = 0.0, 0, 0.0
        by_size = [observed for _, observed in sorted(self._sizes.items())]
        for place, observed in enumerate(by_size):
            size, seconds = observed.mean.value, observed.time.value
            since = [larger.time.value for larger in by_size[place + 1 :] if larger.last > observed.last]
            seconds = min([seconds, *since])
            previous_age, age = age, self._count - observed.last
            if before and self._forgets:
                # Steps for which a size that does not run bounds the times of larger ones. Chosen.
                if previous_age < 16:
                    seconds = min(seconds, least * size / before)
                # Steps without a size after which its excess over the next smaller size halves, so that one that was
                # slow while all steps were is tried again. Chosen: rare enough not to show in the waits where the size
                # really is slow.
                seconds = least + (seconds - least) * 0.5 ** (age / 2048)
            before, least = size, max(least, seconds)
            yield size, least

    def __call__(self, size: int) -> float:
        """The time of a size: that of the nearest point beyond the first and the last; 0 without points."""
        if self._points is None:
            self._points = list(self._rising())
        points = self._points
        i = bisect.bisect_left(points, (size,))
        if i == 0 or i == len(points):
            return points[min(i, len(points) - 1)][1] if points else 0.0
        (before, least), (after, most) = points[i - 1], points[i]
        return least + (size - before) / (after - before) * (most - least)


def _most_within(seconds: float, most: int, curve: Callable[[int], float]) -> int:
    """The largest number up to `most` whose time is at most `seconds`; 0 if there is none."""
    return bisect.bisect_right(range(1, most + 1), seconds, key=curve)
