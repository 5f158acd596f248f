"""Speed of edits with predicted outputs, one request at a time: beside plain decoding, and beside a draft.

Each case of `edits.jsonl` asks for a text to be edited. A small model does not follow such instructions well, so the
text before the edit (`before`) shows little of the effect of predictions on a model that does. Therefore the prediction
`kept` is the model's own greedy answer with a tenth of its tokens replaced, inserted or deleted, in runs of up to four.
`own` is that answer without changes, and `wrong` the answer to another case. `plain` has no speculation, and
`unpredicted` the target's own without a prediction. Every mode of a case runs in each round, in turn, on one target;
each answer should be plain decoding's (in bf16 a pass of more rows may choose another word at a near tie).

    python -m benchmarks.serving.predicted_outputs [--drafters none,prompt_lookup] [--json FILE]
        [--model FOLDER --target '{"device": "cuda"}']
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from benchmarks.serving.services import flags_of
from benchmarks.shared.processes import process, wait_for
from benchmarks.shared.report import comma_separated, parser_of, provenance, record_table, write_json
from outrider.sampling import SamplingParams
from outrider_client import Client, Result, Speculation
from outrider_client.local.stack import wait_for_drafter

CASES = Path(__file__).parents[1] / "edits.jsonl"
PLAIN, UNPREDICTED = "plain", "unpredicted"
MODES = (PLAIN, UNPREDICTED, "kept", "own", "before", "wrong")
# Share of the model's own answer that remains in `kept`.
STAYS = 0.9
LONGEST_EDIT = 4
# A wrong prediction is the answer to the case this share of all cases further on, of another kind and another text.
ANOTHER = 3 / 8
NO_DRAFTER = "none"
# Tokens. Shorter answers take a step or two, whose time means nothing.
SHORTEST = 16
Item = TypeVar("Item")


@dataclass(frozen=True)
class PredictedCase:
    """A text, and the instruction to edit it."""

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


def read_cases() -> list[PredictedCase]:
    """All cases of the file beside this folder."""
    lines = map(json.loads, CASES.read_text(encoding="utf-8").splitlines())
    return [PredictedCase(line["id"], line["kind"], line["before"], line["instruction"]) for line in lines]


def edited(tokens: Sequence[int], seed: int) -> list[int]:
    """The text with a tenth of its tokens edited: runs at random places are replaced by tokens of the text, such tokens
    are inserted, or runs are deleted."""
    rng, text = random.Random(seed), list(tokens)
    remaining = round((1 - STAYS) * len(tokens))
    while remaining > 0:
        count = min(remaining, rng.randint(1, LONGEST_EDIT))
        place, kind = rng.randrange(len(text) - count), rng.randrange(3)
        new = [rng.choice(tokens) for _ in range(count)] if kind != 2 else []
        text[place : place + (count if kind != 1 else 0)] = new
        remaining -= count
    return text


def another(items: Sequence[Item], place: int) -> Item:
    """The item of another case than that at `place`, for a wrong prediction."""
    return items[(place + max(1, int(ANOTHER * len(items)))) % len(items)]


def predictions(
    cases: Sequence[PredictedCase], answers: Sequence[Result], place: int
) -> dict[str, str | list[int] | None]:
    """The prediction of a case's request, by mode."""
    own = list(answers[place].token_ids)
    return {
        PLAIN: None,
        UNPREDICTED: None,
        "kept": edited(own, place),
        "own": own,
        "before": cases[place].before,
        "wrong": list(another(answers, place).token_ids),
    }


@asynccontextmanager
async def target_with(drafter: str, settings: Mapping[str, Any]) -> AsyncIterator[tuple[Client, int]]:
    """A client of a target with these settings and a drafter (or `NO_DRAFTER`), and the target's process id."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        address, drafting = f"unix:{folder}/target", f"unix:{folder}/draft"
        flags = flags_of({"listen": address, "prefix_cache": False, **settings})
        if drafter != NO_DRAFTER:
            draft = stack.enter_context(process("-m", "draft_service", "--listen", drafting, "--drafter", drafter))
            await asyncio.to_thread(wait_for, drafting, draft)
            flags += ["--draft", drafting]
        target = stack.enter_context(process("-m", "target_service", *flags))
        await asyncio.to_thread(wait_for, address, target)
        async with Client.connect(address) as client:
            if drafter != NO_DRAFTER:
                assert await wait_for_drafter(client, drafter)
            yield client, target.pid


async def measure(options: argparse.Namespace) -> list[Sample]:
    """Every mode of every case, with each drafter."""
    cases = read_cases()[:: options.every]
    settings = {"model": options.model, "dtype": options.dtype, "threads": options.threads, **options.target}
    samples: list[Sample] = []
    for drafter in options.drafters:
        async with target_with(drafter, settings) as (client, _):
            samples += await measure_target(client, cases, drafter, options)
    return samples


async def measure_target(
    client: Client, cases: Sequence[PredictedCase], drafter: str, options: argparse.Namespace
) -> list[Sample]:
    """One target's samples: first the plain answers, which the predictions are made of, then rounds of all modes."""
    sampling = SamplingParams(max_tokens=options.max_tokens)

    async def answer(case: PredictedCase, mode: str, prediction: str | Sequence[int] | None) -> Result:
        speculation = Speculation(enabled=False if mode == PLAIN else None)
        return await client.generate(
            messages=case.messages, sampling=sampling, prediction=prediction, speculation=speculation
        ).result()

    answers = [await answer(case, PLAIN, None) for case in cases]
    samples: list[Sample] = []
    for turn in range(options.rounds):
        for place, case in enumerate(cases):
            if len(answers[place].token_ids) < SHORTEST:
                continue
            predicted = predictions(cases, answers, place)
            # No mode is always the first.
            first = (turn + place) % len(options.modes)
            for mode in (*options.modes[first:], *options.modes[:first]):
                result = await answer(case, mode, predicted[mode])
                same = result.token_ids == answers[place].token_ids
                samples.append(sample_of(result, case, drafter, mode, turn, same=same))
        sys.stderr.write(f"{drafter}: round {turn + 1} of {options.rounds}\n")
    return samples


def sample_of(result: Result, case: PredictedCase, drafter: str, mode: str, turn: int, *, same: bool) -> Sample:
    """The sample of an answer."""
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
    """The table: figures by drafter, mode and kind, relative to plain decoding in the same round."""
    plain = {(one.drafter, one.case, one.round): one for one in samples if one.mode == PLAIN}
    rows: list[dict[str, object]] = []
    for drafter in dict.fromkeys(one.drafter for one in samples):
        for mode in MODES:
            for kind in (*dict.fromkeys(one.kind for one in samples), "all"):
                chosen = [
                    one for one in samples if (one.drafter, one.mode) == (drafter, mode) and kind in (one.kind, "all")
                ]
                if len(chosen) > 1:
                    reference = [plain[one.drafter, one.case, one.round] for one in chosen]
                    rows.append({"drafter": drafter, "mode": mode, "kind": kind, **figures(chosen, reference)})
    return rows


def figures(chosen: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, object]:
    """Of samples, each with the plain one of its round."""
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


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafters", default="none,prompt_lookup", type=comma_separated(str), help="none is no draft")
    parser.add_argument("--modes", default=",".join(MODES), type=comma_separated(str), help="plain among them")
    parser.add_argument("--threads", type=int, default=0, help="of the target; 0 leaves torch's own choice")
    parser.add_argument("--target", default="{}", type=json.loads, help="more settings of the target, as JSON")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="N takes every N-th case")
    parser.add_argument("--max-tokens", type=int, default=160)
    options = parser.parse_args()
    samples = asyncio.run(measure(options))
    rows = rows_of(samples)
    sys.stdout.write(record_table(rows))
    run = {**provenance("serving.predicted_outputs"), "rows": rows, "samples": [asdict(one) for one in samples]}
    write_json(options.json, run)
    if options.json:
        options.json.with_suffix(".md").write_text(record_table(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
