"""What predicted outputs make of edits, at one request at a time: beside plain decoding, and beside a draft.

Each case of `edits.jsonl` asks for a text to be edited. A small model does not follow such instructions well, so the
text before the edit (`before`) says little of what predictions do for a model that does. Therefore there is `kept`: the
model's own greedy answer, of which a tenth of the tokens is exchanged, put in or left out, in runs of up to four. `own`
is that answer untouched, and `wrong` the answer to another case. `plain` speculates in no way, and `unpredicted` as the
target does without a prediction. Every mode of a case runs in each round, in turn, on one target that stays up; the
answer must be plain decoding's each time (in bf16 a pass of more rows may choose another word at a near tie).

    python -m benchmarks.serving.predicted_outputs [--drafters none,prompt_lookup] [--json FILE]
        [--model FOLDER --target '{"device": "cuda"}']
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.serving.services import flags_of
from benchmarks.shared.report import parser_of, write_json
from outrider.machine import describe_commit, describe_machine, describe_versions
from outrider.sampling import SamplingParams
from outrider_client import Client, Result, Speculation
from outrider_client.local.stack import Stack, private_directory, wait_for_drafter

CASES = Path(__file__).parents[1] / "edits.jsonl"
PLAIN, UNPREDICTED = "plain", "unpredicted"
MODES = (PLAIN, UNPREDICTED, "kept", "own", "before", "wrong")
# Of the model's own answer, in `kept`.
STAYS = 0.9
LONGEST_EDIT = 4
# The answer to the case that lies so much of all further on is a wrong prediction: of another kind and another text.
ANOTHER = 3 / 8
NO_DRAFTER = "none"
SHORTEST = 16


@dataclass(frozen=True)
class Case:
    """A text, and how it is to be edited."""

    id: str
    kind: str
    before: str
    instruction: str

    @property
    def messages(self) -> list[tuple[str, str]]:
        """The conversation to continue."""
        return [("user", f"{self.instruction} Answer with the whole text and nothing else.\n\n{self.before}")]


@dataclass(frozen=True)
class Sample:
    """One answer."""

    case: str
    kind: str
    drafter: str
    mode: str
    round: int
    tokens: int
    steps: int
    # From the first token to the last, by the target's clock.
    decode_seconds: float
    drafted: int
    accepted_prediction: int
    rejected_prediction: int
    same_as_plain: bool

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - 1) / self.decode_seconds


def read_cases() -> list[Case]:
    """All cases of the file beside this folder."""
    lines = map(json.loads, CASES.read_text(encoding="utf-8").splitlines())
    return [Case(line["id"], line["kind"], line["before"], line["instruction"]) for line in lines]


def edited(said: Sequence[int], seed: int) -> list[int]:
    """The text with a tenth of its tokens edited, so that nine tenths stay: runs that are exchanged, put in or left
    out, at places and of tokens drawn from the text itself."""
    rng, text = random.Random(seed), list(said)
    left = round((1 - STAYS) * len(said))
    while left > 0:
        count = min(left, rng.randint(1, LONGEST_EDIT))
        place, kind = rng.randrange(len(text) - count), rng.randrange(3)
        others = [rng.choice(said) for _ in range(count)] if kind != 2 else []
        text[place : place + (count if kind != 1 else 0)] = others
        left -= count
    return text


def predictions(cases: Sequence[Case], answers: Sequence[Result], place: int) -> dict[str, str | list[int] | None]:
    """By mode, what a case's request predicts."""
    said = list(answers[place].token_ids)
    return {
        PLAIN: None,
        UNPREDICTED: None,
        "kept": edited(said, place),
        "own": said,
        "before": cases[place].before,
        "wrong": list(answers[(place + max(1, int(ANOTHER * len(cases)))) % len(cases)].token_ids),
    }


async def measure(arguments: argparse.Namespace) -> list[Sample]:
    """Every mode of every case, with each drafter."""
    cases = read_cases()[:: arguments.every]
    samples: list[Sample] = []
    for drafter in arguments.drafters.split(","):
        with private_directory() as folder:
            async with Stack(folder) as stack:
                settings = {"model": arguments.model, "dtype": arguments.dtype, "threads": arguments.threads}
                flags = flags_of(settings | arguments.target)
                if drafter != NO_DRAFTER:
                    flags += ["--draft", await stack.start("draft", "draft_service", "--drafter", drafter)]
                address = await stack.start("target", "target_service", *flags)
                async with Client.connect(address) as client:
                    if drafter != NO_DRAFTER:
                        assert await wait_for_drafter(client, drafter)
                    samples += await measure_target(client, cases, drafter, arguments)
    return samples


async def measure_target(
    client: Client, cases: Sequence[Case], drafter: str, arguments: argparse.Namespace
) -> list[Sample]:
    """One target's samples: first each plain answer, which the predictions are made of, then rounds of all modes."""
    sampling = SamplingParams(max_tokens=arguments.max_tokens)

    async def answer(case: Case, mode: str, prediction: str | Sequence[int] | None) -> Result:
        speculation = Speculation(enabled=False if mode == PLAIN else None)
        return await client.generate(
            messages=case.messages, sampling=sampling, prediction=prediction, speculation=speculation
        ).result()

    answers = [await answer(case, PLAIN, None) for case in cases]
    samples: list[Sample] = []
    for turn in range(arguments.rounds):
        for place, case in enumerate(cases):
            if len(answers[place].token_ids) < SHORTEST:
                # Its time is that of a step or two.
                continue
            predicted = predictions(cases, answers, place)
            # No mode is always the first.
            modes = arguments.modes.split(",")
            first = (turn + place) % len(modes)
            for mode in (*modes[first:], *modes[:first]):
                result = await answer(case, mode, predicted[mode])
                same = result.token_ids == answers[place].token_ids
                samples.append(sample_of(result, case, drafter, mode, turn, same=same))
        sys.stderr.write(f"{drafter}: round {turn + 1} of {arguments.rounds}\n")
    return samples


def sample_of(result: Result, case: Case, drafter: str, mode: str, turn: int, *, same: bool) -> Sample:
    """What is kept of an answer."""
    return Sample(
        case=case.id,
        kind=case.kind,
        drafter=drafter,
        mode=mode,
        round=turn,
        tokens=result.completion_tokens,
        steps=result.speculation.steps,
        decode_seconds=result.times.decode,
        drafted=result.speculation.drafted_tokens,
        accepted_prediction=result.accepted_prediction_tokens,
        rejected_prediction=result.rejected_prediction_tokens,
        same_as_plain=same,
    )


def rows_of(samples: Sequence[Sample]) -> list[dict[str, object]]:
    """The table: by drafter, mode and kind, medians over cases and rounds of the ratio to the same round's plain."""
    plain = {(one.drafter, one.case, one.round): one for one in samples if one.mode == PLAIN}
    rows: list[dict[str, object]] = []
    for drafter in dict.fromkeys(one.drafter for one in samples):
        for mode in MODES:
            for kind in (*dict.fromkeys(one.kind for one in samples), "all"):
                chosen = [
                    one for one in samples if (one.drafter, one.mode) == (drafter, mode) and kind in (one.kind, "all")
                ]
                if len(chosen) > 1:
                    beside = [plain[one.drafter, one.case, one.round] for one in chosen]
                    rows.append({"drafter": drafter, "mode": mode, "kind": kind, **figures(chosen, beside)})
    return rows


def figures(chosen: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, object]:
    """Of samples, each beside the plain one of its round."""
    ratios = [one.rate / other.rate for one, other in zip(chosen, plain, strict=True)]
    low, _, high = quantiles(ratios, n=4)
    tokens, seconds = sum(one.tokens - 1 for one in chosen), sum(one.decode_seconds for one in chosen)
    accepted, rejected = (sum(getattr(one, f"{how}_prediction") for one in chosen) for how in ("accepted", "rejected"))
    return {
        "n": len(chosen),
        "ratio_median": round(median(ratios), 3),
        "ratio_quartiles": [round(low, 3), round(high, 3)],
        "tokens_per_second": round(tokens / seconds, 1),
        "tokens_per_step": round(sum(one.tokens for one in chosen) / sum(one.steps for one in chosen), 3),
        "accepted_prediction": accepted,
        "rejected_prediction": rejected,
        "same_as_plain": sum(one.same_as_plain for one in chosen),
    }


def table_of(rows: Sequence[dict[str, object]]) -> str:
    """The rows as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", default="none,prompt_lookup", help="with commas between; none is no draft")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas between; plain among them")
    parser.add_argument("--threads", type=int, default=0, help="of the target; 0 leaves torch's own choice")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="take every so many cases")
    parser.add_argument("--max-tokens", type=int, default=160)
    arguments = parser.parse_args()
    samples = asyncio.run(measure(arguments))
    rows = rows_of(samples)
    sys.stdout.write(table_of(rows))
    document = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "commit": describe_commit(),
        "command": " ".join(["python -m benchmarks.serving.predicted_outputs", *sys.argv[1:]]),
        "rows": rows,
        "samples": [asdict(one) for one in samples],
    }
    write_json(arguments.json, document)
    if arguments.json:
        arguments.json.with_suffix(".md").write_text(table_of(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
