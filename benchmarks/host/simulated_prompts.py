"""What prompts cost the streams that run: the engine's own scheduler on a simulated device, with a clock of its own.

    python -m benchmarks.host.simulated_prompts [--wait-ms 24] [--streams 8,32,64] [--rate 16] [--timeline]

A pass takes the time of the captured size that it runs as, as an 8B shape does on an H100 (`PASS_MS`), and some more
for each sequence's context. One pass is launched while another runs, so a prompt that arrives begins in the pass behind
those two. Sequences have the pass's rows beside prompts for their drafts, and accept as many as a merged draft brings.
Prompts have the lengths of `benchmarks/prompts.jsonl` and answers 128 tokens, in closed loops as those of a client that
sends the next prompt when an answer has ended, or at a rate. The times between tokens, to the first token, and of it
all are those of the device: no host, no network.
"""

from __future__ import annotations

import bisect
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.kv_cache import KVCache
from target_service.core.schedule import Schedule
from target_service.core.scheduler import Scheduler
from target_service.core.sequence import Sequence as TokenSequence
from target_service.core.sequence import SequenceRequest, SequenceState, SequenceTotals
from target_service.model.cuda_graphs.sizes import row_sizes

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
# Characters of a token, about.
_CHARACTERS = 4
ANSWER_TOKENS = 128
MOST_ROWS = 2048
# Milliseconds of a pass by its rows, Llama-8B: 1 and 64 rows measured on an H100
# (`benchmarks/results/2026-11-27-h100-steps.json`), 1,024 from 6,000 tokens read in 159 ms there, 128 to 512 in
# proportion to an H200's (`benchmarks/results/2026-11-23-h200-widened-seventh.md`).
PASS_MS = ((1, 5.55), (64, 6.6), (128, 7.6), (256, 9.7), (512, 14.5), (1024, 26.5), (2048, 51.0))
# And more for each sequence, of some 400 tokens of context: a third of what 64 of 1,024 take beyond 64 rows of one.
_SEQUENCE_MS = 0.02
# The chance that a drafted token is accepted whose parent was, with one row a level more: a pass of a merged draft
# makes 2.5 tokens of a sequence with 15 rows.
_ACCEPTED = 0.62


def pass_seconds(rows: int, sequences: int) -> float:
    """Of a captured size, interpolated linearly."""
    sizes, times = zip(*PASS_MS, strict=True)
    i = min(max(1, bisect.bisect_left(sizes, rows)), len(sizes) - 1)
    share = (rows - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
    return float(times[i - 1] + share * (times[i] - times[i - 1]) + _SEQUENCE_MS * sequences) * 1e-3


@dataclass
class Stream:
    """A request: when it arrived, and when its tokens came."""

    sequence: TokenSequence
    arrived: float
    tokens: int = 0
    times: list[float] = field(default_factory=list)


@dataclass
class _Pass:
    schedule: Schedule
    rows: int
    drafted_each: float
    seconds: float


class SimulatedPrompts:
    """A scheduler, and passes one behind the other."""

    def __init__(self, wait_ms: float, *, drafted: bool = True, seed: int = 0, max_running: int = 256) -> None:
        cache = KVCache(1 << 16, 16, [(1, 1, 1)], torch.float32, torch.device("cpu"))
        config = TargetConfig(device="cuda", max_running=max_running, prompt_wait_ms=wait_ms, prefix_cache=False)
        sizes = row_sizes(MOST_ROWS)
        self.scheduler = Scheduler(config, cache, lambda _: sizes, lambda rows: pass_seconds(rows, 1))
        self.now = 0.0
        self.streams: dict[int, Stream] = {}
        self.done: list[Stream] = []
        # Of every pass: when it ended, its sequences that decode, rows of prompts, rows in all, and seconds.
        self.timeline: list[tuple[float, int, int, int, float]] = []
        self._sizes, self._drafted = sizes, drafted
        # Requests that the scheduler has not seen, and when the pass began behind which the next one is launched.
        self._arrived: list[Stream] = []
        self._begun = 0.0
        self._dice = random.Random(seed)
        self._count = 0

    def ask(self, prompt_tokens: int, arrived: float | None = None) -> Stream:
        """A request arrives, now unless it has `arrived` before."""
        self._count += 1
        tokens = [self._count] * prompt_tokens
        request = SequenceRequest(tuple(tokens), SamplingParams(), VerificationMode.GREEDY, 0, ANSWER_TOKENS)
        totals = SequenceTotals(prompt_tokens=prompt_tokens)
        arrived = self.now if arrived is None else arrived
        stream = self.streams[self._count] = Stream(TokenSequence(self._count, request, tokens, totals), arrived)
        self._arrived.append(stream)
        return stream

    def run_pass(self, until: float = float("inf")) -> bool:
        """Run the next pass to its end, or wait `until` something arrives. False where nothing is left to run."""
        if not self.scheduler.running:
            # Nothing is launched behind a pass.
            self._begun = self.now
        for stream in [one for one in self._arrived if one.arrived <= self._begun]:
            self._arrived.remove(stream)
            self.scheduler.add(stream.sequence)
        schedule = self.scheduler.schedule()
        self._begun = self.now
        if not schedule.chunks:
            self.now = max(self.now, until) if until < float("inf") else self.now
            return until < float("inf")
        one = self._laid_out(schedule)
        self.scheduler.count_launched(schedule)
        self.scheduler.prompt_rows.observe_drafted(schedule, one.rows if one.drafted_each else 0)
        self.now += one.seconds
        self._commit(one)
        return True

    def _laid_out(self, schedule: Schedule) -> _Pass:
        decoding = len(schedule.chunks) - schedule.prefilling
        held = schedule.prefill_rows + decoding
        sizes = [size for size in self._sizes if size >= held]
        rows = sizes[0]
        if self._drafted and decoding and not schedule.prefilling:
            # The size that makes most.
            rate = lambda size: (1 + _accepted((size - held) / decoding)) / pass_seconds(size, decoding)  # noqa: E731
            rows = max(sizes, key=rate)
        each = (rows - held) / decoding if self._drafted and decoding else 0.0
        return _Pass(schedule, rows, each, pass_seconds(rows, len(schedule.chunks)))

    def _commit(self, one: _Pass) -> None:
        schedule = one.schedule
        decoding = len(schedule.chunks) - schedule.prefilling
        self.scheduler.times.observe_step(decoding, schedule.prefill_rows, one.seconds, own=schedule.own)
        self.timeline.append((self.now, decoding, schedule.prefill_rows, one.rows, one.seconds))
        for chunk in schedule.chunks:
            sequence = chunk.sequence
            stream = self.streams[sequence.sequence_id]
            sequence.kv_length += chunk.count
            if not chunk.reaches_root:
                continue
            count = 1 + (self._draw(one.drafted_each) if chunk.takes_tree else 0)
            sequence.kv_length += count - 1
            sequence.token_ids += [0] * count
            sequence.state = SequenceState.RUNNING
            stream.tokens += count
            stream.times.append(self.now)
            if stream.tokens >= ANSWER_TOKENS:
                self.scheduler.remove(sequence)
                self.done.append(self.streams.pop(sequence.sequence_id))

    def _draw(self, rows: float) -> int:
        accepted, depth = 0, _depth(rows)
        while accepted < depth and self._dice.random() < _ACCEPTED * min(1.0, depth - accepted):
            accepted += 1
        return accepted


def _depth(rows: float) -> float:
    """Levels of a tree of so many rows, the best rows first."""
    return rows if rows < 1 else min(8.0, 1 + (rows - 1) ** 0.5)


def _accepted(rows: float) -> float:
    depth, total, chance = _depth(rows), 0.0, 1.0
    while depth > 0:
        chance *= _ACCEPTED * min(1.0, depth)
        total, depth = total + chance, depth - 1
    return total


def prompt_lengths(seed: int = 0) -> Iterator[int]:
    """Without an end: those of real prompts below 1,500 tokens."""
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    lengths = [length for length in (8 + len(text) // _CHARACTERS for text in texts) if length < 1500]
    random.Random(seed).shuffle(lengths)
    while True:
        yield from lengths


def closed_loop(played: SimulatedPrompts, streams: int, answers: int) -> None:
    """`answers` answers in all, of so many streams."""
    lengths = prompt_lengths()
    left = answers
    while played.streams or left:
        while left and len(played.streams) < streams:
            played.ask(next(lengths))
            left -= 1
        played.run_pass()


def at_rate(played: SimulatedPrompts, rate: float, requests: int, seed: int = 5) -> None:
    """Poisson arrivals, a fifth of them of 2,500 tokens."""
    dice, lengths = random.Random(seed), prompt_lengths()
    # With what has not begun to arrive yet.
    arrivals, at = [], 0.0
    for _ in range(requests):
        arrivals.append((at, next(lengths) if dice.random() < 0.8 else 2500))
        at += dice.expovariate(rate)
    while arrivals or played.streams:
        while arrivals and arrivals[0][0] <= played.now:
            arrived, length = arrivals.pop(0)
            played.ask(length, arrived)
        played.run_pass(arrivals[0][0] if arrivals else float("inf"))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def figures(played: SimulatedPrompts) -> dict[str, float]:
    """Milliseconds, and tokens a second."""
    gaps = [after - before for one in played.done for before, after in zip(one.times, one.times[1:], strict=False)]
    firsts = [one.times[0] - one.arrived for one in played.done]
    read, rows = sum(one[2] for one in played.timeline), sum(one[3] for one in played.timeline)
    return {
        "tokens_per_second": round(sum(one.tokens for one in played.done) / played.now, 1),
        "first_p50": round(1e3 * percentile(firsts, 0.5), 1),
        "first_p99": round(1e3 * percentile(firsts, 0.99), 1),
        "gap_p50": round(1e3 * percentile(gaps, 0.5), 1),
        "gap_p99": round(1e3 * percentile(gaps, 0.99), 1),
        "read_share": round(read / max(1, rows), 3),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--wait-ms", type=float, default=0.0, help="--prompt-wait-ms of the target; 0 is its default")
    parser.add_argument("--streams", default="8,32,64,128", type=comma_separated(int))
    parser.add_argument("--rate", type=float, default=16.0)
    parser.add_argument("--plain", action="store_true", help="without drafts")
    parser.add_argument("--timeline", action="store_true", help="show every pass")
    options = parser.parse_args()
    results = []
    for streams in options.streams:
        played = SimulatedPrompts(options.wait_ms, drafted=not options.plain)
        closed_loop(played, streams, 6 * streams)
        results.append({"streams": streams, **figures(played)})
        show(" ".join(f"{name} {value}" for name, value in results[-1].items()))
    played = SimulatedPrompts(options.wait_ms, drafted=not options.plain)
    at_rate(played, options.rate, int(12 * options.rate))
    results.append({"rate": options.rate, **figures(played)})
    show(" ".join(f"{name} {value}" for name, value in results[-1].items()))
    if options.timeline:
        for ended, decoding, read, rows, seconds in played.timeline:
            took = f"{1e3 * seconds:5.1f} ms"
            show(f"{1e3 * ended:9.1f} ms: {decoding:3d} decode, {read:4d} of {rows:4d} rows read, {took}")
    write_json(options.json, {"settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
