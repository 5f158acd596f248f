"""Runs of requests against one service, and figures of their answers, for decoding alone and with prompts."""

from __future__ import annotations

import math
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving.clients import Clients, Reply, ServingRequest
from benchmarks.serving.figures import TimedAnswer, Window
from benchmarks.shared.report import percentile
from benchmarks.shared.workload import Prompt, chat_tokens
from benchmarks.widened.metrics import CONNECTED, SPECULATING, Key, Page, difference, fetch, step_figures, total, value
from outrider_client.bench.prompts import load_prompts

NEW, REPEATED = "new", "repeated"
_SHUFFLE_SEED = 0
# Prompts of each task that are never measured, for warming up and settling. Chosen: few, since the others are measured.
_WARM_PER_TASK = 3
_WARM_TOKENS = 16
# Until the target has counted the last step, after sending its tokens. Chosen: the time of many steps.
_COUNTED_SECONDS = 0.2
# Tokens a second of one stream for which settling prepares requests; it ends by time. Above any 8B stream measured.
_FASTEST = 1500


def read_tasks(tokenizer: Any, file: Path, longest: int) -> dict[str, list[Prompt]]:
    """Token ids of the first turns by task, in the file's order, without those of more than `longest` tokens."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in load_prompts(file):
        ids = chat_tokens(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        if len(ids) <= longest:
            tasks.setdefault(prompt.task, []).append(ids)
    return tasks


class PromptCursor:
    """Takes prompts from each task in turn, in the same order for every service and every mode of verification.

    No tenant gets a prompt twice: after the last prompt, the next tenant begins with the first one, which its drafts
    have not read either. Requests that are taken together are one tenant's if there are enough prompts, since tenants
    that run at once are scheduled fairly, which is not what is measured. Each mode of verification has its own tenants.
    """

    def __init__(self, tasks: Mapping[str, Sequence[Prompt]], verification: str = "") -> None:
        """`verification` is that of every request; see `ServingRequest`."""
        self._verification = verification
        rng = random.Random(_SHUFFLE_SEED)
        shuffled = [rng.sample(list(prompts), len(prompts)) for _, prompts in sorted(tasks.items())]
        # At least half of a small task is measured.
        kept = [min(_WARM_PER_TASK, len(prompts) // 2) for prompts in shuffled]
        self.warm = _deal([prompts[:count] for prompts, count in zip(shuffled, kept, strict=True)])
        self._measured = _deal([prompts[count:] for prompts, count in zip(shuffled, kept, strict=True)])
        self._all = self._measured + self.warm
        self._taken = self._settled = 0

    @property
    def laps(self) -> int:
        """How often every prompt has been taken."""
        return self._taken // len(self._measured)

    def next_prompts(self, count: int, tokens: int, temperature: float) -> list[ServingRequest]:
        """The next `count` requests. Each has its own seed, the same for every service."""
        left = -self._taken % len(self._measured)
        if left < count <= len(self._measured):
            self._taken += left
        self._taken += count
        return self._requests(self._measured, "measured", range(self._taken - count, self._taken), tokens, temperature)

    def settling(self, count: int, tokens: int, temperature: float, at_once: int = 1) -> list[ServingRequest]:
        """Requests that are not measured; no tenant gets a prompt twice. Where more run `at_once` than there are
        prompts to warm up with, they have all prompts, but are other tenants than those that are measured."""
        prompts, kind = (self.warm, "settling") if at_once <= len(self.warm) else (self._all, "crowd")
        self._settled += count
        return self._requests(prompts, kind, range(self._settled - count, self._settled), tokens, temperature)

    def _requests(
        self, prompts: Sequence[Prompt], kind: str, numbers: range, tokens: int, temperature: float
    ) -> list[ServingRequest]:
        requests = []
        for number in numbers:
            lap, place = divmod(number, len(prompts))
            tenant = "-".join(filter(None, (self._verification, kind, str(lap))))
            requests.append(
                ServingRequest(prompts[place], tokens, tenant, temperature, number, verification=self._verification)
            )
        return requests


def _deal(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each group in turn."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


class Rate(NamedTuple):
    """Tokens, and the seconds in which they arrived."""

    tokens: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        return round(self.tokens / self.seconds, 2) if self.seconds > 0 else None


def sum_of(rates: Iterable[Rate]) -> Rate:
    """All tokens over all seconds."""
    each = list(rates)
    return Rate(sum(one.tokens for one in each), sum(one.seconds for one in each))


def busy_spans(answers: Iterable[TimedAnswer], concurrency: int) -> list[Window]:
    """When `concurrency` answers at once were between their first and their last message."""
    edges = [edge for one in answers if len(one.times) > 1 for edge in ((one.times[0], 1), (one.end, -1))]
    spans, active, since = list[Window](), 0, 0.0
    # Of the same moment, ends are sorted before beginnings.
    for moment, change in sorted(edges):
        if active == concurrency and change < 0 and moment > since:
            spans.append(Window(since, moment))
        active += change
        if active == concurrency:
            since = moment
    return spans


def decoding_rate(answers: Sequence[TimedAnswer], concurrency: int) -> Rate:
    """Tokens that arrived while all streams were decoding.

    With one stream that is every answer from its first message to its last. With several, messages of one step arrive
    one after the other: spans are shortened by half a median gap at each end, where no message arrives, and so contain
    whole steps.
    """
    gaps = [later - sooner for one in answers for sooner, later in pairwise(one.times)]
    margin = statistics.median(gaps) / 2 if gaps and concurrency > 1 else 0.0
    shrunk = (Window(span.begin + margin, span.end - margin) for span in busy_spans(answers, concurrency))
    spans = [span for span in shrunk if span.end > span.begin]
    ends = [span.end for span in spans]

    def counts(moment: float) -> bool:
        place = bisect_left(ends, moment)
        return place < len(spans) and spans[place].holds(moment)

    tokens = 0
    for one in answers:
        # The first message is of the step that reads the prompt.
        later = list(zip(one.times, one.counts, strict=True))[1:]
        tokens += sum(count for moment, count in later if counts(moment))
    return Rate(tokens, sum(span.end - span.begin for span in spans))


def in_flight_rates(replies: Sequence[Reply], concurrency: int) -> tuple[Rate, Rate]:
    """(rate of streams, rate of the service) while every slot had a request in flight, after the first tokens of all.

    The first has the streams' tokens over the time that they were decoding, `concurrency` of them side by side; reading
    others' prompts in between slows it. The second is of the whole service, with the time of prompts.
    """
    slots: dict[int, list[TimedAnswer]] = {}
    for one in replies:
        slots.setdefault(one.slot, []).append(one.answer)
    begin = max(min(answer.times[0] for answer in answers) for answers in slots.values())
    window = Window(begin, min(max(answer.end for answer in answers) for answers in slots.values()))
    stream_seconds, decoded, arrived = 0.0, 0, 0
    for answer in (one.answer for one in replies):
        stream_seconds += max(0.0, min(window.end, answer.end) - max(window.begin, answer.times[0]))
        inside = [count for moment, count in zip(answer.times, answer.counts, strict=True) if window.holds(moment)]
        arrived += sum(inside)
        decoded += sum(inside) - (answer.counts[0] if window.holds(answer.times[0]) else 0)
    return Rate(decoded, stream_seconds / concurrency), Rate(arrived, max(0.0, window.end - window.begin))


@dataclass(frozen=True, slots=True)
class Run:
    """The rounds of one repeat, each begun with nothing in flight, and the increases of the target's metrics."""

    rounds: tuple[tuple[Reply, ...], ...]
    seconds: float
    spent: Page

    def replies(self) -> list[Reply]:
        return [one for of_round in self.rounds for one in of_round]

    def decoding(self, concurrency: int) -> Rate:
        return sum_of(decoding_rate([one.answer for one in of_round], concurrency) for of_round in self.rounds)


def run_figures(runs: Sequence[Run], concurrency: int) -> dict[str, Any]:
    """Figures of all repeats together, and their spread."""
    replies = [one for run in runs for one in run.replies()]
    each = [run.decoding(concurrency) for run in runs]
    decoding = sum_of(each)
    in_flight = [in_flight_rates(of_round, concurrency) for run in runs for of_round in run.rounds]
    streams, service = (sum_of(rates) for rates in zip(*in_flight, strict=True))
    rates = [rate for one in each if (rate := one.per_second) is not None]
    seconds = sum(run.seconds for run in runs)
    firsts = [one.answer.times[0] - one.answer.begin for one in replies]
    # The first token of an answer and its step are not decoding.
    steps = sum(one.steps - 1 for one in replies)
    tokens = sum(one.answer.tokens for one in replies)
    return {
        "tokens_per_second": decoding.per_second,
        "ratio_to_plain": None,
        "spread": {
            "min": min(rates, default=None),
            "median": round(statistics.median(rates), 2) if rates else None,
            "max": max(rates, default=None),
        },
        "tokens_per_step": round(sum(one.answer.tokens - 1 for one in replies) / steps, 4) if steps > 0 else None,
        # Share of accepted drafts that the model would not have drawn: 0 except in typical acceptance.
        "lossy_share": round(sum(one.lossy_tokens for one in replies) / tokens, 4) if tokens else None,
        "stream_tokens_per_second": streams.per_second,
        "tokens_per_second_with_prompts": service.per_second,
        "measured": {"tokens": decoding.tokens, "seconds": round(decoding.seconds, 4), "of_seconds": round(seconds, 4)},
        "first_token_ms": {
            "p50": round(statistics.median(firsts) * 1e3, 3),
            "p99": round(percentile(firsts, 0.99) * 1e3, 3),
        },
        "n": {"answers": len(replies), "tokens": tokens, "repeats": len(runs)},
        **step_figures(total(run.spent for run in runs)),
    }


class Measuring:
    """Runs against one service, in which no tenant has a measured prompt twice."""

    def __init__(
        self,
        clients: Clients,
        page: str,
        tasks: Mapping[str, Sequence[Prompt]],
        tokens: int,
        verification: str = "",
    ) -> None:
        """`page` is the URL of the target's metrics, `tokens` the length of answers, `verification` as in
        `ServingRequest`."""
        self._clients = clients
        self._page = page
        self._tokens = tokens
        self._cursor = PromptCursor(tasks, verification)

    def warm_up(self, concurrency: Sequence[int], temperatures: Sequence[float]) -> None:
        """A few short answers at the least and at the largest load."""
        for temperature in temperatures:
            for load in dict.fromkeys((1, max(concurrency))):
                count = max(load, 2)
                self._clients.streams(self._cursor.settling(count, _WARM_TOKENS, temperature, load), load)

    def settle(self, concurrency: int, temperature: float, seconds: float) -> None:
        """Load that is not measured, until policies have adapted to it."""
        if seconds > 0:
            each = 2 + math.ceil(seconds * _FASTEST / self._tokens)
            requests = self._cursor.settling(each * concurrency, self._tokens, temperature, concurrency)
            self._clients.streams(requests, concurrency, seconds)

    def repeat(self, concurrency: int, temperature: float, count: int, waves: bool) -> tuple[Run, list[ServingRequest]]:
        """`count` new prompts; see `run`."""
        requests = self._cursor.next_prompts(count, self._tokens, temperature)
        return self.run(requests, concurrency, waves), requests

    def run(self, requests: Sequence[ServingRequest], concurrency: int, waves: bool) -> Run:
        """Send the requests, in waves that wait for their last answer, or each slot's one after the other."""
        size = concurrency if waves else len(requests)
        before, begin = fetch(self._page), time.monotonic()
        rounds = [
            self._clients.streams(requests[start : start + size], concurrency)
            for start in range(0, len(requests), size)
        ]
        seconds = time.monotonic() - begin
        time.sleep(_COUNTED_SECONDS)
        return Run(tuple(map(tuple, rounds)), seconds, difference(before, fetch(self._page)))

    def state(self) -> dict[str, bool | None]:
        """Whether the target is connected to its draft, and uses it, now."""
        page: dict[Key, float] = fetch(self._page)
        return {
            "draft_connected": _flag(value(page, CONNECTED)),
            "speculation_active": _flag(value(page, SPECULATING)),
        }

    @property
    def laps(self) -> int:
        """See `PromptCursor.laps`."""
        return self._cursor.laps


def _flag(number: float | None) -> bool | None:
    return None if number is None else bool(number)


def answers_of(concurrency: int, per_stream: int, least: int) -> int:
    """Answers of a run: the same number for every stream, and at least `least` in all."""
    return concurrency * max(per_stream, -(-least // concurrency))


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `ratio_to_plain`: to plain decoding at the same load and temperature, or None without that."""
    plain = {
        (row["concurrency"], row["temperature"]): row["tokens_per_second"]
        for row in rows
        if row["mode"] == "plain" and row.get("tokens_per_second") and row["prompts"] == NEW
    }
    done = []
    for row in rows:
        base = plain.get((row.get("concurrency"), row.get("temperature")))
        own = row.get("tokens_per_second")
        done.append({**row, "ratio_to_plain": round(own / base, 4) if base and own else None})
    return done
