"""What a wrong prediction costs, one request at a time: pairs of the same answer, with one and without.

    python -m benchmarks.serving.wrong_prediction [--drafters none,prompt_lookup] [--json FILE]

A pair is one case of `edits.jsonl`, sent without a prediction and with the model's answer to another case as its
prediction, one right after the other on the same target. Their order alternates from round to round, so that slow
drifts affect both alike. Two costs are compared:

- seconds: from the first token to the last, by the target's clock. They include other work on the machine.
- processor: time that all threads of the target were running for the request, its prompt included, by the kernel's
  scheduler. Waiting for a core is not in it.

Counts beside them, with a wrong prediction and without, show where a difference may come from: steps, rows of the draft
and time that steps waited for it.

Over all cases, `median` is the median over pairs of the ratio of the two costs, and `together` the ratio of their sums.
The intervals are of 95 %, by a bootstrap over cases: rounds of a case are not independent of each other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks.serving.predicted_outputs import SHORTEST, PredictedCase, another, read_cases, target_with
from benchmarks.shared.processes import processor_seconds
from benchmarks.shared.report import comma_separated, interval_95, parser_of, provenance, record_table, write_json
from outrider.sampling import SamplingParams
from outrider_client import Client, Result

BAR = 1.02
DRAWS = 4000
Cost = Callable[["Half"], float]


@dataclass(frozen=True)
class Half:
    """One answer of a pair.

    Attributes:
        seconds: from its first token to the last, by the target's clock.
        processor: seconds of the target's threads.
        rejected, accepted: rows of the prediction.
        drafted: rows of the draft.
        waited: seconds that steps waited for the draft.
    """

    seconds: float
    processor: float
    tokens: int
    steps: int
    rejected: int
    accepted: int
    drafted: int
    waited: float


@dataclass(frozen=True)
class Pair:
    """A case's answer with a wrong prediction, and without one, in the same round."""

    case: str
    drafter: str
    round: int
    wrong: Half
    plain: Half
    same: bool


# Each per token, since answers may differ in length after a near tie.
COSTS: dict[str, Cost] = {
    "seconds": lambda half: half.seconds / (half.tokens - 1),
    "processor": lambda half: half.processor / half.tokens,
}


async def measure(options: argparse.Namespace) -> list[Pair]:
    """All pairs, with each drafter."""
    cases = read_cases()[:: options.every]
    settings = {"model": options.model, "dtype": options.dtype, "threads": options.threads}
    pairs: list[Pair] = []
    for drafter in options.drafters:
        async with target_with(drafter, settings) as (client, pid):
            pairs += await measure_target(client, pid, cases, drafter, options)
    return pairs


async def measure_target(
    client: Client, pid: int, cases: Sequence[PredictedCase], drafter: str, options: argparse.Namespace
) -> list[Pair]:
    """One target's pairs; the plain answers, which wrong predictions are made of, come first."""
    sampling = SamplingParams(max_tokens=options.max_tokens)

    async def answer(case: PredictedCase, prediction: Sequence[int] | None) -> tuple[Result, Half]:
        before = processor_seconds(pid)
        result = await client.generate(messages=case.messages, sampling=sampling, prediction=prediction).result()
        used = processor_seconds(pid) - before
        counts = (result.rejected_prediction_tokens, result.accepted_prediction_tokens)
        drafting = result.speculation
        steps = (result.completion_tokens, drafting.steps, *counts)
        waited = drafting.draft_wait_ns * 1e-9
        return result, Half(result.times.decode, used, *steps, drafting.drafted_tokens, waited)

    answers = [(await answer(case, None))[0].token_ids for case in cases]
    pairs: list[Pair] = []
    for turn in range(options.rounds):
        for place, case in enumerate(cases):
            if len(answers[place]) < SHORTEST:
                continue
            other = another(answers, place)
            if (turn + place) % 2:
                wrong, plain = await answer(case, other), await answer(case, None)
            else:
                plain, wrong = await answer(case, None), await answer(case, other)
            same = wrong[0].token_ids == plain[0].token_ids
            pairs.append(Pair(case.id, drafter, turn, wrong[1], plain[1], same))
        sys.stderr.write(f"{drafter}: round {turn + 1} of {options.rounds}: {rows_of(pairs)[-1]}\n")
    return pairs


def rows_of(pairs: Sequence[Pair]) -> list[dict[str, object]]:
    """The table: figures by drafter and cost."""
    rows: list[dict[str, object]] = []
    for drafter in dict.fromkeys(pair.drafter for pair in pairs):
        chosen = [pair for pair in pairs if pair.drafter == drafter]
        for name, cost in COSTS.items():
            rows.append({"drafter": drafter, "cost": name, **figures(chosen, cost)})
    return rows


def figures(pairs: Sequence[Pair], cost: Cost) -> dict[str, object]:
    """Of one drafter's pairs: the two ratios, each with its interval."""
    by_case: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        by_case.setdefault(pair.case, []).append((cost(pair.wrong), cost(pair.plain)))
    cases = list(by_case.values())
    rng = random.Random(0)
    drawn = [rng.choices(cases, k=len(cases)) for _ in range(DRAWS)]
    return {
        "pairs": len(pairs),
        "cases": len(cases),
        "median": round(middle(cases), 4),
        "median_interval": interval_95([middle(one) for one in drawn]),
        "together": round(together(cases), 4),
        "together_interval": interval_95([together(one) for one in drawn]),
        "rejected_rows_an_answer": round(sum(pair.wrong.rejected for pair in pairs) / len(pairs), 1),
        "accepted_rows_an_answer": round(sum(pair.wrong.accepted for pair in pairs) / len(pairs), 2),
        "steps_an_answer": each_way(pairs, lambda half: half.steps),
        "drafted_rows_an_answer": each_way(pairs, lambda half: half.drafted),
        "ms_waited_an_answer": each_way(pairs, lambda half: half.waited * 1e3),
        "same_answers": sum(pair.same for pair in pairs),
    }


def each_way(pairs: Sequence[Pair], count: Cost) -> list[float]:
    """The mean of a count over answers with a wrong prediction, and over those without."""
    halves = ([pair.wrong for pair in pairs], [pair.plain for pair in pairs])
    return [round(sum(map(count, answers)) / len(answers), 1) for answers in halves]


def middle(cases: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The median over all pairs of the ratio of their costs."""
    return median(wrong / plain for case in cases for wrong, plain in case)


def together(cases: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The cost of all answers with a wrong prediction over that of all without one."""
    return sum(wrong for case in cases for wrong, _ in case) / sum(plain for case in cases for _, plain in case)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="in float32 answers with and without are the same")
    parser.add_argument("--drafters", default="none,prompt_lookup", type=comma_separated(str), help="none is no draft")
    parser.add_argument("--threads", type=int, default=1, help="of the target")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=1, help="N takes every N-th case")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    pairs = asyncio.run(measure(options))
    rows = rows_of(pairs)
    sys.stdout.write(record_table(rows))
    run = {**provenance("serving.wrong_prediction"), "bar": BAR, "rows": rows, "pairs": [asdict(one) for one in pairs]}
    write_json(options.json, run)
    if options.json:
        options.json.with_suffix(".md").write_text(record_table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
