"""Scores a drafter on token traces, with no service and no model in the loop.

A trace is one JSON object a line: `id`, `task`, `prompt` (token ids), `output` (token ids). The drafter proposes, and
gets the tokens that a greedy target would have committed, step by step, to the output's end.

    python -m benchmarks.drafters.draft_quality TRACES [--drafter trie] [--rows 8,16,32,pays] [--set breadth=4]
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.shared.report import comma_separated, parser_of, show, write_json
from draft_service.config import drafter_config
from draft_service.drafters.base import DRAFTERS, Drafter, DraftSequence, create, drafter_spec
from draft_service.ngram.drafter import NgramDrafter
from outrider.tree import TokenTree


@dataclass(frozen=True)
class Trace:
    """Token ids of one request and its answer."""

    task: str
    prompt: list[int]
    output: list[int]


@dataclass
class QualityTally:
    """Sums over the steps of one task."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    cost: float = 0.0
    propose_seconds: float = 0.0

    def add(self, other: QualityTally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def load(path: Path, half: str) -> list[Trace]:
    """Read traces; `half` is "even", "odd" or "all" of each task's."""
    by_task: dict[str, list[Trace]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        by_task[record["task"]].append(Trace(record["task"], record["prompt"], record["output"]))
    keep = {"even": (0,), "odd": (1,), "all": (0, 1)}[half]
    return [trace for traces in by_task.values() for i, trace in enumerate(traces) if i % 2 in keep]


def rows_that_pay(tree: TokenTree, slope: float, rate: float) -> int:
    """The number of rows that maximises expected tokens less `rate` * cost; the cost of n rows is 1 + slope * n.

    With `rate` the tokens per cost of the whole run, this maximises that rate (renewal reward theorem); maximising each
    step's own ratio does not.
    """
    path_probs = [1.0]
    for row in range(1, len(tree)):
        path_probs.append(path_probs[tree.parents[row]] * tree.scores[row])
    expected = list(itertools.accumulate(path_probs))
    return max(range(len(tree)), key=lambda n: expected[n] - rate * (1.0 + slope * n))


def walk(tree: TokenTree, rows: int, future: Sequence[int]) -> int:
    """The number of accepted nodes among the first `rows` below the root, given the target's next tokens."""
    row = 0
    for accepted, token in enumerate(future):
        hits = (child for child in tree.children[row] if child <= rows and tree.token_ids[child] == token)
        row = next(hits, 0)
        if not row:
            return accepted
    return len(future)


def replay(drafter: Drafter, trace: Trace, rows: int | None, slope: float, sequence_id: int) -> QualityTally:
    """Draft one trace to its end, with `rows` rows a step, or for None with the rows that pay."""
    tally = QualityTally()
    sequence = DraftSequence(sequence_id, list(trace.prompt), len(trace.prompt), 1 << 20)
    drafter.open(sequence)
    done = 0
    while done < len(trace.output):
        begin = time.perf_counter()
        tree = drafter.propose([sequence])[0]
        tally.propose_seconds += time.perf_counter() - begin
        if rows is None:
            # The rate so far, with a prior of two tokens per unit of cost.
            used = rows_that_pay(tree, slope, (tally.tokens + 8) / (tally.cost + 4))
        else:
            used = min(rows, tree.drafted)
        accepted = walk(tree, used, trace.output[done:])
        committed = trace.output[done : done + accepted + 1]
        sequence.token_ids.extend(committed)
        drafter.advance(sequence, committed)
        done += len(committed)
        tally.steps += 1
        tally.tokens += len(committed)
        tally.rows += used
        tally.cost += 1.0 + slope * used
    drafter.close(sequence)
    if isinstance(drafter, NgramDrafter):
        # Later drafts must not depend on timing.
        drafter.flush()
    return tally


def score(drafter: Drafter, traces: Iterable[Trace], rows: int | None, slope: float) -> dict[str, QualityTally]:
    """Replay all traces in order. Returns sums by task."""
    tallies: dict[str, QualityTally] = defaultdict(QualityTally)
    for sequence_id, trace in enumerate(traces, start=1):
        tallies[trace.task].add(replay(drafter, trace, rows, slope, sequence_id))
    return tallies


def report(tallies: dict[str, QualityTally]) -> dict[str, dict[str, float]]:
    """By task, and over all: tokens and rows per step, tokens per cost of a plain step, and the time of drafting."""
    total = QualityTally()
    for tally in tallies.values():
        total.add(tally)
    return {
        task: {
            "tokens_per_step": round(tally.tokens / tally.steps, 3),
            "rows_per_step": round(tally.rows / tally.steps, 1),
            "speedup_at_cost": round(tally.tokens / tally.cost, 3),
            "propose_us": round(tally.propose_seconds / tally.steps * 1e6, 1),
        }
        for task, tally in (*tallies.items(), ("all", total))
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path, help="file of traces; benchmarks/drafters/make_traces.py writes one")
    parser.add_argument("--drafter", default="trie", choices=DRAFTERS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the drafter")
    parser.add_argument("--rows", default="8,16,32,pays", type=comma_separated(str), help="rows per step, or pays")
    parser.add_argument("--slope", type=float, default=0.024, help="cost of one more row, in plain steps")
    parser.add_argument("--half", default="all", choices=("even", "odd", "all"), help="which traces of each task")
    options = parser.parse_args()
    spec = drafter_spec(options.drafter)
    environment = {}
    for item in options.set:
        name, _, value = item.partition("=")
        environment[f"OUTRIDER_{spec.name.upper()}_{name.upper()}"] = value
    traces = load(options.traces, options.half)
    figures = {}
    for rows in options.rows:
        drafter = create(spec.name, partial(drafter_config, environment=environment))
        drafter.start()
        figures[rows] = report(score(drafter, traces, None if rows == "pays" else int(rows), options.slope))
        drafter.stop()
        for task, line in figures[rows].items():
            numbers = "  ".join(f"{name} {value:g}" for name, value in line.items())
            show(f"{rows:>5} rows  {task:<16} {numbers}")
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
