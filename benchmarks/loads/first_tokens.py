"""When first tokens come where prompts are long, shared or come at a rate, and what those that decode lose by that: the
engine's own loop on a simulated device, with a clock of its own.

    python -m benchmarks.loads.first_tokens [--loads rate16,shared8,long8,loop64] [--draft good] [--seeds 0,1]
        [--timeline 3] [--json FILE]

The loads are those of `benchmarks.serving.whole_answers`, with the same arrivals and about the same lengths of prompts;
texts are made up (`loads.texts`). Passes take what those of an 8B shape take on an H200 with a head behind each, as
`outrider up` starts it (`shapes.HeadedShape`). Each load begins behind a warm-up and eight short streams, as in a run
of all loads: what passes take is known then. Milliseconds of first tokens are a client's, with `CLIENT_SECONDS`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.host.simulated_prompts import PROMPTS
from benchmarks.loads.shapes import HeadedShape
from benchmarks.loads.simulation import CLIENT_SECONDS, DRAFTS, AnsweredRequest, PassOnTimeline, SimulatedEngine
from benchmarks.loads.texts import VOCABULARY, SimulatedDrafts, SimulatedText, made_up_text
from benchmarks.serving.whole_answers import parsed
from benchmarks.shared.report import (
    comma_separated,
    parser_of,
    percentile,
    provenance,
    record_table,
    settings_of,
    show,
    write_json,
)

# Tokens of a short prompt at most, as in those loads; of the chat's template, and characters of a token, about.
_SHORT, _TEMPLATE, _CHARACTERS = 1500, 30, 4.2


@dataclass
class SimulatedLoad:
    """Requests: their texts, and when they come, in seconds from its beginning; if it is `closed`, only the first of
    each stream come by themselves."""

    texts: list[SimulatedText]
    arrivals: list[float]
    closed: bool


def load_of(name: str, seed: int, drafts: SimulatedDrafts) -> SimulatedLoad:
    """A load of `benchmarks.serving.whole_answers`. Raises `ValueError` for one that is not simulated."""
    kind, count = parsed(name)
    lengths = _short_lengths()
    if kind == "rate":
        return _at_rate(count, seed, lengths, drafts)
    number = {"loop": max(8, 3 * count), "shared": max(12, 4 * count), "long": max(6, 2 * count)}.get(kind)
    if number is None:
        raise ValueError(f"{name!r} is not simulated")
    begin = 7 * count if kind == "loop" else 0
    short = [lengths[(begin + i) % len(lengths)] for i in range(number)]
    seeds = [1000 * seed + 100_000 * (kind != "loop") + i for i in range(number)]
    if kind == "long":
        texts = [made_up_text(one, 6000, 32, drafts) for one in seeds]
    elif kind == "loop":
        texts = [made_up_text(one, own, 128, drafts) for one, own in zip(seeds, short, strict=True)]
    else:
        texts = [_behind_shared(one, 3000, own, 64, drafts) for one, own in zip(seeds, short, strict=True)]
    return SimulatedLoad(texts, [0.0] * count, closed=True)


def _short_lengths() -> list[int]:
    """Of the prompts of the file, in its order."""
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    return [length for length in (_TEMPLATE + int(len(text) / _CHARACTERS) for text in texts) if length < _SHORT]


def _behind_shared(seed: int, shared: int, own: int, answer: int, drafts: SimulatedDrafts) -> SimulatedText:
    """A text whose first `shared` tokens all such texts have."""
    text = SimulatedText(seed, shared + own, answer, drafts)
    text.token_ids[:shared] = random.Random(shared).choices(range(VOCABULARY), k=shared)
    return text


def _at_rate(rate: int, seed: int, lengths: Sequence[int], drafts: SimulatedDrafts) -> SimulatedLoad:
    dice, texts, arrivals, at = random.Random(5 + seed), list[SimulatedText](), list[float](), 0.0
    for number in range(12 * rate):
        short = lengths[(3 * number + 1) % len(lengths)]
        arrivals.append(at)
        texts.append(made_up_text(1000 * seed + number, short if dice.random() < 0.8 else 2500, 128, drafts))
        at += dice.expovariate(rate)
    return SimulatedLoad(texts, arrivals, closed=False)


def run(engine: SimulatedEngine, load: SimulatedLoad) -> list[AnsweredRequest]:
    """Answer all requests of a load, which begins now."""
    begin = engine.now
    return engine.answer(load.texts, [begin + at for at in load.arrivals], closed=load.closed)


def figures(served: Sequence[AnsweredRequest]) -> dict[str, float]:
    """As `benchmarks.serving.whole_answers.figures`."""
    ends, begin = [one.tokens[-1][0] for one in served], min(one.arrived for one in served)
    firsts = [1e3 * (one.first + CLIENT_SECONDS) for one in served]
    counts = [sum(count for _, count in one.tokens) for one in served]
    each = [1e3 * (end - one.tokens[0][0]) / (count - 1) for one, end, count in zip(served, ends, counts, strict=True)]
    gaps = [1e3 * (after - at) for one in served for (at, _), (after, _) in itertools.pairwise(one.tokens)]
    return {
        "tokens_per_second": round(sum(counts) / (max(ends) - begin), 1),
        "first_p50_ms": round(percentile(firsts, 0.5), 1),
        "first_p99_ms": round(percentile(firsts, 0.99), 1),
        "ms_a_token_p50": round(percentile(each, 0.5), 2),
        "gap_p99_ms": round(percentile(gaps, 0.99), 1),
    }


def show_latest(
    served: Sequence[AnsweredRequest], load: SimulatedLoad, passes: Sequence[PassOnTimeline], count: int
) -> None:
    """Show the passes for which the latest first tokens waited."""
    latest = sorted(zip(served, load.texts, strict=True), key=lambda pair: -pair[0].first)[:count]
    for one, text in latest:
        show(f"{text.prompt_tokens} tokens, first {1e3 * one.first:.1f} ms")
        for ran in passes:
            if ran.end > one.arrived and ran.begin < one.tokens[0][0]:
                begin, end = (1e3 * (at - one.arrived) for at in (ran.begin, ran.end))
                work = f"{ran.decoding} decode, {ran.read} of {ran.rows} rows read"
                show(f"  {begin:6.1f} to {end:6.1f} ms: {work}")


def measured(name: str, draft: str, seed: int, timeline: int = 0) -> dict[str, float]:
    """The figures of a load, behind others."""
    drafts = DRAFTS[draft] or SimulatedDrafts()
    engine = SimulatedEngine(HeadedShape(), draft, behind_passes=True, shares=True)
    warm_up = [made_up_text(99_000 + i, 200, 64, drafts) for i in range(16)]
    run(engine, SimulatedLoad(warm_up, [0.0] * 8, closed=True))
    run(engine, load_of("loop8", seed + 50, drafts))
    load, before = load_of(name, seed, drafts), len(engine.device.timeline)
    served = run(engine, load)
    show_latest(served, load, engine.device.timeline[before:], timeline)
    return figures(served)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--loads", default="rate16,shared8,long8,loop1,loop8,loop32,loop64,loop128", type=comma_separated(str)
    )
    parser.add_argument("--draft", default="good")
    parser.add_argument("--seeds", default="0,1", type=comma_separated(int))
    parser.add_argument("--timeline", type=int, default=0, help="passes of so many of the latest first tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, seed in itertools.product(options.loads, options.seeds):
        rows.append({"load": name, "seed": seed, **measured(name, options.draft, seed, options.timeline)})
        show(" ".join(f"{key} {value}" for key, value in rows[-1].items()))
    show(record_table(rows))
    write_json(options.json, {**provenance("loads.first_tokens"), "settings": settings_of(options), "rows": rows})


if __name__ == "__main__":
    main()
