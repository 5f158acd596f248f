"""Runs of requests against one service, and figures of their answers: decoding alone, without reading prompts."""

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

from benchmarks.serving.clients import Ask, Clients, Reply
from benchmarks.serving.figures import Answer, Window, percentile
from benchmarks.shared.workload import Prompt, chat_tokens
from benchmarks.widened.metrics import CONNECTED, SPECULATING, Key, Page, difference, fetch, step_figures, total, value
from outrider_client.bench.prompts import load_prompts

NEW, REPEATED = "new", "repeated"
_SHUFFLE_SEED = 0
# Prompts of each task that warm services up and let them settle, and are never measured. Chosen: few, so that nearly
# all are left to be measured.
_WARM_PER_TASK = 3
_WARM_TOKENS = 16
# A target counts a step after it has sent the step's tokens. Chosen: many steps' time.
_COUNTED_SECONDS = 0.2
# Tokens a second of one stream for which settling has requests ready; it ends by time. Above any 8B stream measured.
_FASTEST = 1500


def read_tasks(tokenizer: Any, file: Path, longest: int) -> dict[str, list[Prompt]]:
    """Token ids of the first turns by task, in the file's order, those of more than `longest` tokens left out."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in load_prompts(file):
        ids = chat_tokens(tokenizer, [{"role": "user", "content": prompt.turns[0]}])
        if len(ids) <= longest:
            tasks.setdefault(prompt.task, []).append(ids)
    return tasks


class PromptCursor:
    """Hands out prompts task by task in turn, in an order that is the same for every service and every mode of
    verification.

    None is handed out twice to the same tenant: when all have been, they are handed out to another, whose drafts have
    not read them either. Each mode has tenants of its own.
    """

    def __init__(self, tasks: Mapping[str, Sequence[Prompt]], verification: str = "") -> None:
        """`verification` is asked for by every request; see `Ask`."""
        self._verification = verification
        dice = random.Random(_SHUFFLE_SEED)
        shuffled = [dice.sample(list(prompts), len(prompts)) for _, prompts in sorted(tasks.items())]
        # Small tasks keep something to be measured.
        kept = [min(_WARM_PER_TASK, len(prompts) // 2) for prompts in shuffled]
        self.warm = _deal([prompts[:count] for prompts, count in zip(shuffled, kept, strict=True)])
        self._measured = _deal([prompts[count:] for prompts, count in zip(shuffled, kept, strict=True)])
        self._taken = self._settled = 0

    @property
    def laps(self) -> int:
        """How often every prompt has been handed out."""
        return self._taken // len(self._measured)

    def take(self, count: int, tokens: int, temperature: float) -> list[Ask]:
        """The next `count` requests. Seeds tell requests apart, and are the same for every service."""
        asks = []
        for number in range(self._taken, self._taken + count):
            lap, place = divmod(number, len(self._measured))
            asks.append(self._ask(self._measured[place], tokens, f"measured-{lap}", temperature, number))
        self._taken += count
        return asks

    def settling(self, count: int, tokens: int, temperature: float) -> list[Ask]:
        """Requests that are not measured, no two of the same prompt for one tenant."""
        asks = []
        for number in range(self._settled, self._settled + count):
            lap, place = divmod(number, len(self.warm))
            asks.append(self._ask(self.warm[place], tokens, f"settling-{lap}", temperature, number))
        self._settled += count
        return asks

    def _ask(self, prompt: Prompt, tokens: int, tenant: str, temperature: float, seed: int) -> Ask:
        own = f"{self._verification}-{tenant}" if self._verification else tenant
        return Ask(prompt, tokens, own, temperature, seed, verification=self._verification)


def _deal(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One of each group in turn."""
    return [prompt for row in zip_longest(*groups) for prompt in row if prompt is not None]


class Rate(NamedTuple):
    """Tokens, and the seconds in which they came."""

    tokens: int
    seconds: float

    @property
    def per_second(self) -> float | None:
        return round(self.tokens / self.seconds, 2) if self.seconds > 0 else None


def together(rates: Iterable[Rate]) -> Rate:
    """Of all of them."""
    each = list(rates)
    return Rate(sum(one.tokens for one in each), sum(one.seconds for one in each))


def busy_spans(answers: Iterable[Answer], concurrency: int) -> list[Window]:
    """When `concurrency` answers at once were past their first message and not at their last."""
    edges = [edge for one in answers if len(one.times) > 1 for edge in ((one.times[0], 1), (one.end, -1))]
    spans, active, since = list[Window](), 0, 0.0
    # At one moment ends come before beginnings.
    for moment, change in sorted(edges):
        if active == concurrency and change < 0 and moment > since:
            spans.append(Window(since, moment))
        active += change
        if active == concurrency:
            since = moment
    return spans


def decoding_rate(answers: Sequence[Answer], concurrency: int) -> Rate:
    """What came while all streams were decoding.

    With one stream that is every answer from its first message to its last. With several, messages of one step arrive
    one after the other: a span begins and ends half a usual gap from its edges, where none arrives, and so holds whole
    steps.
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
        # The first message is reading the prompt.
        later = list(zip(one.times, one.counts, strict=True))[1:]
        tokens += sum(count for moment, count in later if counts(moment))
    return Rate(tokens, sum(span.end - span.begin for span in spans))


def in_flight_rates(replies: Sequence[Reply], concurrency: int) -> tuple[Rate, Rate]:
    """While every slot had a request in flight, from when all had their first token.

    The first rate is of streams: their tokens over the time that they spent decoding, `concurrency` of them side by
    side; others' prompts, read in between, slow it. The second is of the whole service, prompts included.
    """
    slots: dict[int, list[Answer]] = {}
    for one in replies:
        slots.setdefault(one.slot, []).append(one.answer)
    begin = max(min(answer.times[0] for answer in answers) for answers in slots.values())
    window = Window(begin, min(max(answer.end for answer in answers) for answers in slots.values()))
    stream_seconds, decoded, came = 0.0, 0, 0
    for answer in (one.answer for one in replies):
        stream_seconds += max(0.0, min(window.end, answer.end) - max(window.begin, answer.times[0]))
        inside = [count for moment, count in zip(answer.times, answer.counts, strict=True) if window.holds(moment)]
        came += sum(inside)
        decoded += sum(inside) - (answer.counts[0] if window.holds(answer.times[0]) else 0)
    return Rate(decoded, stream_seconds / concurrency), Rate(came, max(0.0, window.end - window.begin))


@dataclass(frozen=True, slots=True)
class Run:
    """The rounds of one repeat, each of which began with nothing in flight, and what the target counted meanwhile."""

    rounds: tuple[tuple[Reply, ...], ...]
    seconds: float
    spent: Page

    def replies(self) -> list[Reply]:
        return [one for of_round in self.rounds for one in of_round]

    def decoding(self, concurrency: int) -> Rate:
        return together(decoding_rate([one.answer for one in of_round], concurrency) for of_round in self.rounds)


def run_figures(runs: Sequence[Run], concurrency: int) -> dict[str, Any]:
    """What the repeats came to together, and how far apart they were."""
    replies = [one for run in runs for one in run.replies()]
    each = [run.decoding(concurrency) for run in runs]
    decoding = together(each)
    in_flight = [in_flight_rates(of_round, concurrency) for run in runs for of_round in run.rounds]
    streams, service = (together(rates) for rates in zip(*in_flight, strict=True))
    rates = [rate for one in each if (rate := one.per_second) is not None]
    seconds = sum(run.seconds for run in runs)
    firsts = [one.answer.times[0] - one.answer.begin for one in replies]
    # Neither the first token of an answer nor the step that made it is decoding.
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
        # Drafts kept that the model would not have drawn, of all tokens: 0 but in typical acceptance.
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
    """Runs against one service, which reads no measured prompt twice."""

    def __init__(
        self,
        clients: Clients,
        page: str,
        tasks: Mapping[str, Sequence[Prompt]],
        tokens: int,
        verification: str = "",
    ) -> None:
        """`page` is the URL of the target's metrics, `tokens` the length of every answer; see `Ask` for the rest."""
        self._clients = clients
        self._page = page
        self._tokens = tokens
        self._cursor = PromptCursor(tasks, verification)

    def warm_up(self, concurrency: Sequence[int], temperatures: Sequence[float]) -> None:
        """A few short answers at the least and at the largest load."""
        for temperature in temperatures:
            for load in dict.fromkeys((1, max(concurrency))):
                count = max(load, 2)
                self._clients.streams(self._cursor.settling(count, _WARM_TOKENS, temperature), load)

    def settle(self, concurrency: int, temperature: float, seconds: float) -> None:
        """Load that is not measured, so that what adapts has adapted."""
        if seconds > 0:
            each = 2 + math.ceil(seconds * _FASTEST / self._tokens)
            asks = self._cursor.settling(each * concurrency, self._tokens, temperature)
            self._clients.streams(asks, concurrency, seconds)

    def repeat(self, concurrency: int, temperature: float, count: int, waves: bool) -> tuple[Run, list[Ask]]:
        """`count` new prompts; see `run`."""
        asks = self._cursor.take(count, self._tokens, temperature)
        return self.run(asks, concurrency, waves), asks

    def run(self, asks: Sequence[Ask], concurrency: int, waves: bool) -> Run:
        """These requests, in waves that wait for their last answer, or each slot's one after the other."""
        size = concurrency if waves else len(asks)
        before, begin = fetch(self._page), time.monotonic()
        rounds = [self._clients.streams(asks[start : start + size], concurrency) for start in range(0, len(asks), size)]
        seconds = time.monotonic() - begin
        time.sleep(_COUNTED_SECONDS)
        return Run(tuple(map(tuple, rounds)), seconds, difference(before, fetch(self._page)))

    def state(self) -> dict[str, bool | None]:
        """Whether the target has its draft, and uses it, just now."""
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
    """Answers of a run: the same number for every stream, and at least so many in all."""
    return concurrency * max(per_stream, -(-least // concurrency))


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `ratio_to_plain`, against plain decoding of the same load and temperature; None where there is none."""
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
