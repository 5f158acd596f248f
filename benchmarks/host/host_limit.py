"""Tokens a second where the host is the limit, as with many sequences of a small model, without a device.

    python -m benchmarks.host.host_limit [--sequences 64] [--pass-ms 0.6] [--modes plain,lookup,draft]
        [--accepted 0,0,1,1,2,3] [--tenants] [--before 1,8,32] [--seconds 6] [--json FILE]

Loop, scheduler, policies, packing and commits are the engine's own; passes are not run, but end as late as their rows
take (see `benchmarks.host.host_time`). Answers of 128 tokens end at different times, and an arrival with a prompt of
60 to 300 tokens takes the place of each. With `--tenants` every lap of twice as many requests is another tenant's, so
that two of them run at once as a rule. `--before` are smaller loads of one tenant that the engine has run by then.
`--accepted` are the drafted tokens that passes accept, each as often. What drafts bring is measured from `--settle`
seconds on: plain decoding should not be faster.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from typing import Any

import torch

from benchmarks.engine.simulated_device import empty_runner
from benchmarks.host.host_time import COSTS, VOCABULARY, ChainDraft, HostOnly, HostRunner, Times
from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, settings_of, show, write_json
from outrider.runtime import settled
from outrider.sampling import SamplingParams, VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.speculation.policy.step_cost import StepCost
from target_service.telemetry.metrics import PrometheusObserver

PLAIN, LOOKUP, DRAFT = "plain", "lookup", "draft"
# Tokens of an answer, bounds of a prompt's, and places of a sequence in the cache.
_ANSWER, _PROMPTS, _PLACES = 128, (60, 300), 1 << 10


class Load:
    """As many sequences as there are places, each replaced when it ends."""

    def __init__(self, loop: EngineLoop, sequences: int, tenants: bool, first: int = 0) -> None:
        """Sequences are numbered from `first` on, and no other load may have their numbers."""
        self._loop, self._lap = loop, 2 * sequences if tenants else 0
        self._random, self.requests = random.Random(3), first
        self.tokens, self._running, self._ends = 0, 0, False
        for _ in range(sequences):
            # The first end one after the other.
            self._add(self._random.randrange(2, _ANSWER))

    def step(self) -> None:
        """Run a step, and count its tokens."""
        for event in self._loop.step() or ():
            if isinstance(event, SequenceFinished):
                self._running -= 1
                if not self._ends:
                    self._add(_ANSWER)
            elif isinstance(event, StepVerdict):
                self.tokens += len(event.token_ids)

    def end(self) -> None:
        """Replace none any more, and run until the last has ended."""
        self._ends = True
        while self._running:
            self.step()

    def _add(self, tokens: int) -> None:
        self.requests += 1
        self._running += 1
        prompt = tuple(self._random.choices(range(VOCABULARY), k=self._random.randrange(*_PROMPTS)))
        sampling = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=tokens)
        tenant = str(self.requests // self._lap) if self._lap else "one"
        request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, tokens, tenant=tenant)
        self._loop.add(self._loop.make(self.requests, request))


def engine(mode: str, options: argparse.Namespace, *, adaptive: bool = True) -> EngineLoop:
    """An engine of one mode, whose draft answers every commit while the next pass but one runs. One that is not
    `adaptive` verifies every drafted row."""
    sequences, one_pass = options.sequences, options.pass_ms * 1e-3
    off: dict[str, Any] = {"speculation": False, "lookup_tokens": 0, "max_draft_nodes": 0} if mode == PLAIN else {}
    config = TargetConfig(
        model="none",
        draft="inprocess:none" if mode == DRAFT else "",
        max_running=sequences,
        speculative_disable_queue_size=2 * sequences,
        **off,
    )
    runner: Any = empty_runner(VOCABULARY, sequences * _PLACES)
    runner.__class__ = HostRunner
    runner.prepare(Times(), sequences, config.step_rows, 2 * _PLACES)
    runner.enable_device_row_selection(sequences, backend="torch")
    cost = [(rows, share * one_pass) for rows, share in COSTS]
    steps = HostOnly(runner, Times(), StepCost(cost), sequences, config.step_rows, accepted=tuple(options.accepted))
    step_cost = StepCost(cost) if adaptive else None
    observer = PrometheusObserver("none", "none", "0")
    loop = EngineLoop(runner, config, steps=steps, step_cost=step_cost, observer=observer)
    if mode == DRAFT:
        draft = ChainDraft(loop.drafting)
        steps.launched = draft.deliver
        loop.drafting.attach(draft)
        loop.drafting.listen()
    return loop


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, and what steps were like: means over the measured time."""
    loop, first, figures = engine(mode, options), 0, defaultdict[str, float](float)
    with settled():
        for sequences in options.before:
            load, begin = Load(loop, sequences, False, first), time.perf_counter()
            while time.perf_counter() - begin < options.each_before:
                load.step()
            load.end()
            first = load.requests
        load, begin = Load(loop, options.sequences, options.tenants, first), time.perf_counter()
        while time.perf_counter() - begin < options.settle:
            load.step()
        load.tokens, steps, since = 0, 0, time.perf_counter()
        while (seconds := time.perf_counter() - since) < options.seconds:
            load.step()
            steps += 1
            if loop._ahead is not None:
                figures["sequences"] += len(loop._ahead.batch.items)
                figures["passes"] += loop._ahead.passes
                figures["with_drafts"] += loop._ahead.has_drafts
            figures["followed"] += loop.drafting.has_open_sequences
    found = {name: round(total / steps, 3) for name, total in sorted(figures.items())}
    return {
        "mode": mode,
        "tokens_per_second": round(load.tokens / seconds),
        "step_ms": round(seconds / steps * 1e3, 3),
    } | found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--pass-ms", type=float, default=0.6)
    parser.add_argument("--modes", default=f"{PLAIN},{LOOKUP},{DRAFT}", type=comma_separated(str))
    parser.add_argument("--accepted", default="0,0,1,1,2,3", type=comma_separated(int))
    parser.add_argument("--tenants", action="store_true", help="two tenants at once")
    parser.add_argument("--before", default="1,8,32", type=comma_separated(int), help="sequences of loads before it")
    parser.add_argument("--each-before", type=float, default=2.0, help="seconds of each of those")
    parser.add_argument("--settle", type=float, default=6.0, help="seconds before what is measured")
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = [measure(mode, options) for mode in options.modes]
    for row in results:
        row["ratio_to_first"] = round(row["tokens_per_second"] / results[0]["tokens_per_second"], 3)
    show(record_table(results))
    write_json(options.json, {**provenance("host.host_limit"), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
