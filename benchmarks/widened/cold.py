"""How soon a draft pays: one request at a time right behind the start, and the same prompts once settled.

    python -m benchmarks.widened.cold --model MODEL --head HEAD --modes head,merged --json OUT.json

Options are those of `benchmarks.widened.run`; of loads and temperatures there is one, a greedy request at a time.
Nothing warms the services up. Then they settle with other prompts for `--settle-seconds`, and another tenant, whose
texts no draft has read, sends the first prompts once more. A row has the tokens a second of decoding, cold and settled,
of the answers that began in the first two seconds of the cold run and of those that began later.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.serving.clients import Clients, Reply
from benchmarks.serving.figures import TimedAnswer
from benchmarks.shared.report import show
from benchmarks.widened.run import REQUEST_SECONDS, Record, Tasks, named, parse, plan_of
from benchmarks.widened.runs import Measuring, PromptCursor, decoding_rate, read_tasks
from benchmarks.widened.services import Subject, SweepPlan, started, subjects_of

# The bar of the design: within 5 % of the settled speed after so long.
COLD_SECONDS = 2.0


def cold_figures(cold: Sequence[TimedAnswer], settled: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Decoding of the same requests, one at a time, in both runs; parted where the cold one was `COLD_SECONDS` old."""
    first = sum(one.begin - cold[0].begin < COLD_SECONDS for one in cold)
    return {
        "first": _compared(cold[:first], settled[:first]),
        "later": _compared(cold[first:], settled[first:]),
    }


def _compared(cold: Sequence[TimedAnswer], settled: Sequence[TimedAnswer]) -> dict[str, Any]:
    rates = decoding_rate(cold, 1).per_second, decoding_rate(settled, 1).per_second
    ratio = round(rates[0] / rates[1], 4) if rates[0] and rates[1] else None
    return {"answers": len(cold), "cold_per_second": rates[0], "settled_per_second": rates[1], "ratio": ratio}


def measure(options: argparse.Namespace, plan: SweepPlan, subject: Subject, tasks: Tasks) -> dict[str, Any]:
    """The row of one mode in one placement."""

    def run(tenant: str) -> list[Reply]:
        # A cursor of its own has the same prompts in the same order, for its own tenants.
        requests = PromptCursor(tasks).next_prompts(options.least_answers, options.tokens, 0.0)
        return clients.streams([one._replace(tenant=tenant) for one in requests], 1)

    with started(plan, subject) as service, Clients(service.address, 1, REQUEST_SECONDS) as clients:
        cold = run("cold")
        Measuring(clients, service.page, tasks, options.tokens).settle(1, 0.0, options.settle_seconds)
        settled = run("settled")
    return cold_figures([one.answer for one in cold], [one.answer for one in settled])


def main() -> None:
    options = parse(about=__doc__)
    # So that services are ended on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.concurrency, options.temperature = [1], [0.0]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    plan, record = plan_of(options), Record(options)
    from transformers import AutoTokenizer

    tasks = read_tasks(AutoTokenizer.from_pretrained(plan.model), options.prompts, options.longest_prompt)
    for subject in subjects_of(options.modes, options.placements):
        row = {**named(subject, options.delay_ms), **measure(options, plan, subject, tasks)}
        record.rows.append(row)
        record.write()
        show(f"{subject.name}: {row['first']} in the first {COLD_SECONDS:g} s, then {row['later']}")


if __name__ == "__main__":
    main()
