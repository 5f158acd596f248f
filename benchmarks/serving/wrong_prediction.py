"""What a wrong prediction costs, at one request at a time: pairs of the same answer, with one and without.

    python -m benchmarks.serving.wrong_prediction [--drafters none,prompt_lookup] [--json FILE]

A pair is one case of `edits.jsonl`, asked plainly and with the model's answer to another case as its prediction, one
right after the other on a target that stays up. Who is first alternates from round to round, so that whatever drifts
slower than a pair takes falls on both alike. Two costs are compared:

- seconds: from the first token to the last, by the target's clock. Other work on the machine is in it.
- processor: time that all threads of the target were at work for the request, its prompt included, by the kernel's
  own count in nanoseconds. Waiting for a core is not in it.

Counts beside them, with a wrong prediction and without, say where a difference may come from: steps, rows of the draft
and time that steps waited for it.

What is said of all cases is the median over pairs of one answer's cost over the other's, and that of all answers
together over that of all others. The intervals hold 95 % of what drawing the cases anew, with all of their rounds,
gives (a bootstrap by case: rounds of a case are not independent of each other).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.serving.predicted_outputs import ANOTHER, NO_DRAFTER, SHORTEST, Case, read_cases
from benchmarks.serving.services import process, wait_for
from outrider.machine import describe_commit, describe_machine, describe_versions
from outrider.sampling import SamplingParams
from outrider_client import Client, Result
from outrider_client.local.stack import wait_for_drafter

BAR = 1.02
DRAWS = 4000
Cost = Callable[["Half"], float]


@dataclass(frozen=True)
class Half:
    """One answer: the target's seconds from its first token to the last, processor seconds, tokens, steps, and rows of
    the prediction that were rejected and accepted. `drafted` are rows of the draft, for which steps waited `waited`
    seconds."""

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


# Each is of a token, since answers may differ where the model is all but undecided.
COSTS: dict[str, Cost] = {
    "seconds": lambda half: half.seconds / (half.tokens - 1),
    "processor": lambda half: half.processor / half.tokens,
}


@contextlib.asynccontextmanager
async def target_of(arguments: argparse.Namespace, drafter: str) -> AsyncIterator[tuple[Client, int]]:
    """A client of a target with that drafter, and the target's process id."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as leave:
        address, drafting = f"unix:{folder}/target", f"unix:{folder}/draft"
        flags = ["--model", arguments.model, "--dtype", arguments.dtype, "--threads", str(arguments.threads)]
        if drafter != NO_DRAFTER:
            helper = ["-m", "draft_service", "--listen", drafting, "--drafter", drafter]
            wait_for(drafting, leave.enter_context(process(*helper)))
            flags += ["--draft", drafting]
        running: subprocess.Popen[bytes] = leave.enter_context(
            process("-m", "target_service", "--listen", address, *flags)
        )
        await asyncio.to_thread(wait_for, address, running)
        async with Client.connect(address) as client:
            if drafter != NO_DRAFTER:
                assert await wait_for_drafter(client, drafter)
            yield client, running.pid


def processor_seconds(pid: int) -> float:
    """Time that all threads of a process have been at work, by the kernel's scheduler. Threads that ended are not in
    it: a target's live as long as it does."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds * 1e-9


async def measure(arguments: argparse.Namespace) -> list[Pair]:
    """All pairs, with each drafter."""
    cases = read_cases()[:: arguments.every]
    pairs: list[Pair] = []
    for drafter in arguments.drafters.split(","):
        async with target_of(arguments, drafter) as (client, pid):
            pairs += await measure_target(client, pid, cases, drafter, arguments)
    return pairs


async def measure_target(
    client: Client, pid: int, cases: Sequence[Case], drafter: str, arguments: argparse.Namespace
) -> list[Pair]:
    """One target's pairs: first each plain answer, which the wrong predictions are made of."""
    sampling = SamplingParams(max_tokens=arguments.max_tokens)

    async def answer(case: Case, prediction: Sequence[int] | None) -> tuple[Result, Half]:
        before = processor_seconds(pid)
        result = await client.generate(messages=case.messages, sampling=sampling, prediction=prediction).result()
        used = processor_seconds(pid) - before
        counts = (result.rejected_prediction_tokens, result.accepted_prediction_tokens)
        drafting = result.speculation
        steps = (result.completion_tokens, drafting.steps, *counts)
        waited = drafting.draft_wait_ns * 1e-9
        return result, Half(result.times.decode, used, *steps, drafting.drafted_tokens, waited)

    said = [(await answer(case, None))[0].token_ids for case in cases]
    pairs: list[Pair] = []
    for turn in range(arguments.rounds):
        for place, case in enumerate(cases):
            if len(said[place]) < SHORTEST:
                # Its time is that of a step or two.
                continue
            other = said[(place + max(1, int(ANOTHER * len(cases)))) % len(cases)]
            if (turn + place) % 2:
                wrong, plain = await answer(case, other), await answer(case, None)
            else:
                plain, wrong = await answer(case, None), await answer(case, other)
            same = wrong[0].token_ids == plain[0].token_ids
            pairs.append(Pair(case.id, drafter, turn, wrong[1], plain[1], same))
        sys.stderr.write(f"{drafter}: round {turn + 1} of {arguments.rounds}: {rows_of(pairs)[-1]}\n")
    return pairs


def rows_of(pairs: Sequence[Pair]) -> list[dict[str, object]]:
    """The table, by drafter and cost."""
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
    medians, wholes = [middle(one) for one in drawn], [together(one) for one in drawn]
    return {
        "pairs": len(pairs),
        "cases": len(cases),
        "median": round(middle(cases), 4),
        "median_interval": interval(medians),
        "together": round(together(cases), 4),
        "together_interval": interval(wholes),
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
    """The cost of all answers with a wrong prediction over that of all without."""
    return sum(wrong for case in cases for wrong, _ in case) / sum(plain for case in cases for _, plain in case)


def interval(values: Sequence[float]) -> list[float]:
    """What 95 % of the values lie in."""
    ordered = sorted(values)
    return [round(ordered[int(share * (len(ordered) - 1))], 4) for share in (0.025, 0.975)]


def table_of(rows: Sequence[dict[str, object]]) -> str:
    """The rows as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", help="in which answers with and without are the same")
    parser.add_argument("--drafters", default="none,prompt_lookup", help="with commas between; none is no draft")
    parser.add_argument("--threads", type=int, default=1, help="of the target")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--every", type=int, default=1, help="take every so many cases")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = asyncio.run(measure(arguments))
    rows = rows_of(pairs)
    sys.stdout.write(table_of(rows))
    if arguments.json:
        document = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "command": " ".join(["python -m benchmarks.serving.wrong_prediction", *sys.argv[1:]]),
            "bar": BAR,
            "rows": rows,
            "pairs": [asdict(one) for one in pairs],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        arguments.json.with_suffix(".md").write_text(table_of(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
