"""What steps took lately, by how many sequences decode in them and how many rows of prompts they read. No clock."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from target_service.core.running_means import RunningMean, RunningTime

# A size's time is the median of its first few steps, in which kernels are compiled, and then a mean of some ten, in
# which one that something held up counts for three. Chosen: what the policies of drafts learn from is as quick.
_FIRST_FEW, _SHARE, _MOST = 5, 0.1, 3.0
# Steps that read, in a row, after which a size that has not decoded alone meanwhile is learnt from them too. Chosen:
# longer than a prompt takes where steps are long enough to read it in a few pieces.
_STALE_AFTER = 16


class StepTimes:
    """Seconds of a step: what its decoding sequences take, and what the rows of prompts beside them add.

    Of whole steps, from the end of one to the end of the next, since that is what tenants wait for. `StepCost` prices
    drafted rows: it knows the model's passes alone, measured at start.

    Only what was seen counts: a size beyond those seen is thought to take no longer than the nearest, and so is tried.
    A tenant whose prompts come without end leaves no step that only decodes: sizes that are not seen in any other are
    learnt from steps that read, or they would be tried for ever.
    """

    def __init__(self) -> None:
        self._decoding, self._reading = _Curve(), _Curve(through_origin=True)
        # Of steps in which nobody decodes: they wait for no draft.
        self._reading_alone = _Curve()
        # By size as `_Curve` tells them apart: steps with prompts since one without.
        self._stale: dict[int, int] = {}

    def observe(self, decoding: int, reading_rows: int, seconds: float) -> None:
        """A step of so many decoding sequences and rows of prompts took so long, to the end of all that follows it."""
        size = decoding.bit_length()
        if not reading_rows:
            self._stale[size] = 0
            self._decoding.observe(decoding, seconds)
            return
        if not decoding:
            self._reading_alone.observe(reading_rows, seconds)
        if not self._decoding.known:
            return
        stale = self._stale[size] = self._stale.get(size, _STALE_AFTER) + 1
        if decoding and stale > _STALE_AFTER:
            self._decoding.observe(decoding, max(0.0, seconds - self._part_of(reading_rows, decoding, seconds)))
        else:
            self._reading.observe(reading_rows, max(0.0, seconds - self._decoding(decoding)))

    def _part_of(self, reading_rows: int, decoding: int, seconds: float) -> float:
        """What reading takes of a step: as known, or else as if a row were like any other."""
        known = self._reading(reading_rows)
        return known if self._reading.known else seconds * reading_rows / (reading_rows + decoding)

    def seconds(self, decoding: int, reading_rows: int) -> float:
        """What such a step takes; 0 where nothing is known."""
        if not decoding and self._reading_alone.known:
            return self._reading_alone(reading_rows)
        return self._decoding(decoding) + self._reading(reading_rows)

    def decoding_within(self, seconds: float, most: int) -> int:
        """The most sequences, and `most` at most, that decode within so many seconds."""
        return _most_within(seconds, most, self._decoding)

    def reading_within(self, decoding: int, seconds: float, most: int) -> int:
        """The most rows of prompts, and `most` at most, that are read beside decoding sequences within that time."""
        return _most_within(seconds - self._decoding(decoding), most, self._reading)


class _Curve:
    """Times by size: one point for all sizes between two powers of two, and straight lines between the points."""

    def __init__(self, *, through_origin: bool = False) -> None:
        self._origin = ((0.0, 0.0),) if through_origin else ()
        # By the power of two.
        self._sizes: dict[int, RunningMean] = {}
        self._times: dict[int, RunningTime] = {}
        self._points: list[tuple[float, float]] = []

    @property
    def known(self) -> bool:
        return bool(self._times)

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        if key not in self._times:
            self._sizes[key] = RunningMean(_SHARE)
            self._times[key] = RunningTime(_SHARE, first_few=_FIRST_FEW, most=_MOST)
        self._sizes[key].observe(size)
        self._times[key].observe(seconds)
        self._points = list(self._rising())

    def _rising(self) -> Iterator[tuple[float, float]]:
        """The points by size. More takes no less, which noise may hide, and whole steps no more than in proportion: a
        size whose first steps were held up would be thought too dear to be tried ever again."""
        yield from self._origin
        before, least = 0.0, 0.0
        for key in sorted(self._times):
            size, seconds = self._sizes[key].value, self._times[key].value
            if before and not self._origin:
                seconds = min(seconds, least * size / before)
            before, least = size, max(least, seconds)
            yield size, least

    def __call__(self, size: int) -> float:
        """The time of a size: beyond the first point and the last that of the nearest, 0 where none is known."""
        points = self._points
        i = bisect.bisect_left(points, (size,))
        if i == 0 or i == len(points):
            return points[min(i, len(points) - 1)][1] if points else 0.0
        (before, least), (after, most) = points[i - 1], points[i]
        return least + (size - before) / (after - before) * (most - least)


def _most_within(seconds: float, most: int, curve: Callable[[int], float]) -> int:
    """The largest number whose time is no longer, 0 where there is none."""
    return bisect.bisect_right(range(1, most + 1), seconds, key=curve)
