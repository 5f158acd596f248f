"""Figures of a load's answers: tokens per second, time to the first token, and time between tokens."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.shared.report import percentile


class TimedAnswer(NamedTuple):
    """One request as its client saw it: when it was sent, and when how many tokens arrived. Monotonic seconds."""

    begin: float
    times: list[float]
    counts: list[int]

    @property
    def end(self) -> float:
        return self.times[-1]

    @property
    def tokens(self) -> int:
        return sum(self.counts)


class Share(NamedTuple):
    """The part of a closed loop that one client process ran, with `slots` requests in flight."""

    slots: int
    answers: list[TimedAnswer]


class Window(NamedTuple):
    """The part of a run that is measured."""

    begin: float
    end: float

    def holds(self, moment: float) -> bool:
        return self.begin < moment <= self.end


def full_window(shares: Sequence[Share]) -> Window:
    """While the whole load is in flight: from when each client has finished as many answers as it has slots, until the
    first client begins its last request."""
    begin = max(sorted(answer.end for answer in share.answers)[share.slots - 1] for share in shares)
    return Window(begin, min(max(answer.begin for answer in share.answers) for share in shares))


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile in milliseconds; None without values."""
    if not seconds:
        return None
    return {
        "median": round(statistics.median(seconds) * 1e3, 3),
        "p99": round(percentile(seconds, 0.99) * 1e3, 3),
        "n": len(seconds),
    }


def latencies(answers: Iterable[TimedAnswer], window: Window | None = None) -> dict[str, Any]:
    """Latencies within the window, or of all answers without one.

    `first_token_ms` is from sending to the first tokens; `message_gap_ms` between messages, each with the tokens of one
    step or several; `token_ms` of each answer is the time after its first message over the tokens in that time.
    """
    firsts: list[float] = []
    gaps: list[float] = []
    each: list[float] = []
    for answer in answers:
        times = answer.times
        if not times:
            continue
        if window is None or (window.holds(answer.begin) and window.holds(times[0])):
            firsts.append(times[0] - answer.begin)
        pairs = itertools.pairwise(times)
        gaps += [later - sooner for sooner, later in pairs if window is None or window.holds(later)]
        after = answer.tokens - answer.counts[0]
        if after and (window is None or window.holds(answer.end)):
            each.append((answer.end - times[0]) / after)
    return {"first_token_ms": _spread(firsts), "message_gap_ms": _spread(gaps), "token_ms": _spread(each)}


def wave_figures(waves: Sequence[tuple[float, list[TimedAnswer]]]) -> dict[str, Any]:
    """Of (seconds, answers) by wave: tokens of all over the time of all, and the median of the waves."""
    tokens = [sum(answer.tokens for answer in answers) for _, answers in waves]
    rates = [count / seconds for count, (seconds, _) in zip(tokens, waves, strict=True)]
    seconds = sum(seconds for seconds, _ in waves)
    return {
        "loop": "waves",
        "n": len(waves),
        "tokens": sum(tokens),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(sum(tokens) / seconds, 2),
        "median_tokens_per_second": round(statistics.median(rates), 2),
        "least": round(min(rates), 2),
        "most": round(max(rates), 2),
        **latencies(answer for _, answers in waves for answer in answers),
    }


def closed_figures(shares: Sequence[Share]) -> dict[str, Any]:
    """Of a closed loop, while the whole load was in flight."""
    window = full_window(shares)
    answers = [answer for share in shares for answer in share.answers]
    arrivals = [pair for answer in answers for pair in zip(answer.times, answer.counts, strict=True)]
    tokens = sum(count for moment, count in arrivals if window.holds(moment))
    seconds = window.end - window.begin
    return {
        "loop": "closed",
        "n": sum(window.holds(answer.end) for answer in answers),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 2),
        **latencies(answers, window),
    }


# Tokens of the shorter and of the longer answers by which steps are timed.
SHORT, LONG = 8, 136


def step_figures(concurrency: int, seconds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of waves timed with answers of `SHORT` and of `LONG` tokens: the time of one more token of every sequence.

    Both times contain reading the prompts, which cancels out; `whole_tokens_per_second` is of the longer ones with it.
    """
    each = [(longer - shorter) / (LONG - SHORT) for shorter, longer in seconds]
    median = statistics.median(each)
    return {
        "loop": "steps",
        "n": len(each),
        "step_ms": round(median * 1e3, 4),
        "least_step_ms": round(min(each) * 1e3, 4),
        "most_step_ms": round(max(each) * 1e3, 4),
        "tokens_per_second": round(concurrency / median, 2),
        "whole_tokens_per_second": round(concurrency * LONG / statistics.median(longer for _, longer in seconds), 2),
        "first_token_ms": None,
        "token_ms": None,
    }


def line(row: dict[str, Any]) -> str:
    """One measurement as a line of text."""
    firsts, each = row["first_token_ms"], row["token_ms"]
    first = f"first token {firsts['median']:8.1f} ms (p99 {firsts['p99']:8.1f})" if firsts else ""
    if "step_ms" in row:
        first = f"step {row['step_ms']:8.3f} ms ({row['least_step_ms']:.3f} to {row['most_step_ms']:.3f})"
    token = f"token {each['median']:6.2f} ms (p99 {each['p99']:6.2f})" if each else ""
    name = f"{row['arrangement']:8s} {row['loop']:6s} c={row['concurrency']:<4d} {row['mode']:12s}"
    return f"{name} {row['tokens_per_second']:10.1f} tok/s  {first}  {token}".rstrip()
