"""What steps took lately, by how many sequences decode in them and how many rows of prompts they read. No clock."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator

from target_service.core.running_means import RunningMean, RunningTime

# A size's time is the median of its first few steps, in which kernels are compiled, and then a mean of some ten, in
# which one that something held up counts for three. Chosen: what the policies of drafts learn from is as quick.
_FIRST_FEW, _SHARE, _MOST = 5, 0.1, 3.0
# Steps that read, in a row, after which a size that has not decoded alone meanwhile is learnt from them too. Chosen:
# longer than a prompt takes where steps are long enough to read it in a few pieces.
_STALE_AFTER = 16
# Steps of one's own of which the shortest is what such a step takes. Chosen: as many as have one that a crowd left
# alone, and few enough to follow contexts that grow.
_LAST = 16
# Steps after which what a size was thought to take more than the next smaller one counts for half, while it is not
# seen: one that was dear while something held up all steps is tried again. Chosen: seldom enough, where it is dear, not
# to be seen among the waits of those whom it holds up.
_FORGOTTEN_HALF = 2048
# Steps for which a size that is not seen bounds what larger ones are thought to take. Chosen.
_FRESH = 16


class StepTimes:
    """Seconds of a step: what its decoding sequences take, and what the rows of prompts beside them add.

    Of whole steps, from the end of one to the end of the next, since that is what tenants wait for. `StepCost` prices
    drafted rows: it knows the model's passes alone, measured at start.

    Only what was seen counts: a size beyond those seen is thought to take no longer than the nearest, and so is tried.
    A tenant whose prompts come without end leaves no step that only decodes: sizes that are not seen in any other are
    learnt from steps that read, or they would be tried for ever.

    What a tenant's own step takes is learnt from steps that no other had a part in. Beside a crowd all sizes take
    longer, since drafts, replies and the other tenant's calls want processors too: shares of what steps take then are
    shares of the crowd's making.
    """

    def __init__(self) -> None:
        self._decoding, self._reading = _Curve(), _Curve(through_origin=True)
        self._own_decoding = _Curve(_Undisturbed)
        # Of steps in which nobody decodes: they wait for no draft.
        self._reading_alone = _Curve()
        # By size as `_Curve` tells them apart: steps with prompts since one without.
        self._stale: dict[int, int] = {}

    def observe(self, decoding: int, reading_rows: int, seconds: float, *, own: bool = True) -> None:
        """A step of so many decoding sequences and rows of prompts took so long, to the end of all that follows it.
        It was some tenant's `own`, or several shared it."""
        size = decoding.bit_length()
        if not reading_rows:
            if own:
                self._own_decoding.observe(decoding, seconds)
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

    def own_seconds(self, decoding: int, reading_rows: int) -> float:
        """The same of a step that no other tenant has a part in."""
        seconds = self.seconds(decoding, reading_rows)
        if not decoding or not self._own_decoding.known:
            return seconds
        return seconds - max(0.0, self._decoding(decoding) - self._own_decoding(decoding))

    def decoding_within(self, seconds: float, most: int) -> int:
        """The most sequences, and `most` at most, that decode within so many seconds."""
        return _most_within(seconds, most, self._decoding)

    def reading_within(self, decoding: int, seconds: float, most: int) -> int:
        """The most rows of prompts, and `most` at most, that are read beside decoding sequences within that time."""
        return _most_within(seconds - self._decoding(decoding), most, self._reading)


class _Undisturbed:
    """What a step takes that nothing else disturbs: the least of late."""

    def __init__(self) -> None:
        self._last = deque[float](maxlen=_LAST)

    @property
    def value(self) -> float:
        return min(self._last)

    def observe(self, seconds: float) -> None:
        self._last.append(seconds)


def _settling() -> RunningTime:
    return RunningTime(_SHARE, first_few=_FIRST_FEW, most=_MOST)


class _Curve:
    """Times by size: one point for all sizes between two powers of two, and straight lines between the points."""

    def __init__(
        self, time: Callable[[], RunningTime | _Undisturbed] = _settling, *, through_origin: bool = False
    ) -> None:
        """`time` makes the time of a size."""
        self._time = time
        self._forgets = time is _settling and not through_origin
        self._origin = ((0.0, 0.0),) if through_origin else ()
        # By the power of two.
        self._sizes: dict[int, RunningMean] = {}
        self._times: dict[int, RunningTime | _Undisturbed] = {}
        # Observations of all sizes, and how many there were at the last of each.
        self._count = 0
        self._last: dict[int, int] = {}
        self._points: list[tuple[float, float]] = []

    @property
    def known(self) -> bool:
        return bool(self._times)

    def observe(self, size: int, seconds: float) -> None:
        key = size.bit_length()
        if key not in self._times:
            self._sizes[key] = RunningMean(_SHARE)
            self._times[key] = self._time()
        self._count += 1
        self._last[key] = self._count
        self._sizes[key].observe(size)
        self._times[key].observe(seconds)
        self._points = list(self._rising())

    def _rising(self) -> Iterator[tuple[float, float]]:
        """The points by size. More takes no less, which noise may hide.

        Of whole steps, which are not begun before they are thought short enough, a size that was held up would be
        thought too dear for ever. So it takes no more than in proportion to a smaller one of now, and is forgotten.
        """
        yield from self._origin
        before, age, least = 0.0, 0, 0.0
        for key in sorted(self._times):
            size, seconds = self._sizes[key].value, self._times[key].value
            if before and self._forgets:
                if age < _FRESH:
                    seconds = min(seconds, least * size / before)
                seconds = least + (seconds - least) * 0.5 ** (self._age(key) / _FORGOTTEN_HALF)
            before, age, least = size, self._age(key), max(least, seconds)
            yield size, least

    def _age(self, key: int) -> int:
        """Steps of any size since the last of this one."""
        return self._count - self._last[key]

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
