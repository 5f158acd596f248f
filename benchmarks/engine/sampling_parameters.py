"""What penalties, log-probabilities and forms of output cost an engine: tokens per second of whole answers beside those
of the same requests without.

    python -m benchmarks.widened.model smollm2-135m-instruct smollm2-135m-instruct MODEL HEAD --shape 8b
    python -m benchmarks.engine.sampling_parameters --model MODEL [--concurrency 1,8,32] [--tokens 200] [--json FILE]

The engine runs in this process, without clients. Waves of as many requests as the concurrency get the same prompts of
the shared file in every case; a wave's rate is all its tokens over the time from the first request to the last token,
prompts included, and `one of all` is the rate of the others where one request of a wave has the parameter. `plain`
decodes without drafts, `lookup` with what the device drafts by itself. Before each measured wave of a case one wave of
it is not measured, in which graphs are captured. Cases take turns within a repeat.

`form` fills in a form of seven fields; its ratio is to unconstrained plain decoding at the same concurrency, by the
tokens of the form. On a CPU (`--device cpu`) this only rehearses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import Prompt, read_prompts
from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.engine import Engine
from target_service.speculation.policy.step_cost import measure_step_cost

FREE = SamplingParams(ignore_eos=True)
_FIELDS = {
    "name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "email": {"type": "string", "maxLength": 30}, "is_customer": {"type": "boolean"},
    "country_of_residence": {"enum": ["Germany", "France", "Spain", "Italy"]},
    "preferred_contact_method": {"enum": ["email", "telephone", "letter"]},
    "number_of_previous_orders": {"type": "integer", "minimum": 0, "maximum": 999},
}  # fmt: skip
SCHEMA = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}
FORM = SamplingParams(structured_output=StructuredOutput(json_schema=json.dumps(SCHEMA)))
CASES: dict[str, SamplingParams] = {
    "none": FREE,
    "penalties": replace(FREE, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.05),
    "biases": replace(FREE, logit_bias={token: 0.5 for token in range(1000, 1100)}),
    "five log-probabilities": replace(FREE, logprobs=5),
    "seeded": replace(FREE, temperature=0.8, seed=5),
    "seeded, penalties": replace(FREE, temperature=0.8, seed=5, presence_penalty=0.3, repetition_penalty=1.05),
    "form": FORM,
}
# What one request of a wave has, beside others with nothing.
ONE_OF_ALL: dict[str, tuple[SamplingParams, VerificationMode | None]] = {
    "none": (FREE, None),
    "penalties": (CASES["penalties"], None),
    "five log-probabilities": (CASES["five log-probabilities"], None),
    "form": (FORM, None),
    "rejection": (replace(FREE, temperature=0.8, seed=5), VerificationMode.REJECTION),
}


@dataclass(frozen=True)
class Wave:
    """Tokens of a wave's requests, and seconds until each had its last one, in the order of the requests."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def rate(self, first: int = 0) -> float:
        """Tokens per second of the requests from the `first` on."""
        return sum(self.tokens[first:]) / max(self.seconds[first:])


class MeasuredEngine:
    """An engine that counts the tokens of its sequences."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._events = EngineEvents(self._count)
        engine.start(self._events.deliver)

    def _count(self, verdict: StepVerdict) -> None:
        self._tokens[verdict.sequence_id] = self._tokens.get(verdict.sequence_id, 0) + len(verdict.token_ids)
        self._last[verdict.sequence_id] = time.perf_counter()

    def wave(self, requests: Sequence[SequenceRequest]) -> Wave:
        """Run these together."""
        begin = time.perf_counter()
        ids = [self._engine.submit(request) for request in requests]
        for _ in ids:
            self._events.wait()
        tokens = tuple([self._tokens.pop(each) for each in ids])
        return Wave(tokens, tuple([self._last.pop(each) - begin for each in ids]))


def request_of(
    prompt: Prompt, sampling: SamplingParams, tokens: int, *, drafts: bool, mode: VerificationMode | None = None
) -> SequenceRequest:
    return SequenceRequest(prompt, sampling, sampling.mode(mode), sampling.seed or 0, tokens, speculate=drafts)


def measured(engine: MeasuredEngine, prompts: Sequence[Prompt], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case, concurrency and kind of drafting."""
    rates: dict[tuple[str, int, str], list[float]] = {}

    def note(case: str, count: int, drafting: str, requests: Sequence[SequenceRequest], first: int = 0) -> None:
        engine.wave(requests)
        rates.setdefault((case, count, drafting), []).append(engine.wave(requests).rate(first))

    for repeat in range(options.repeats):
        for count, drafting in itertools.product(options.concurrency, ("plain", "lookup")):
            drafts, first = drafting == "lookup", repeat * max(options.concurrency)
            own = [prompts[(first + place) % len(prompts)] for place in range(count)]
            for case, sampling in CASES.items():
                note(case, count, drafting, [request_of(each, sampling, options.tokens, drafts=drafts) for each in own])
            for case, (sampling, mode) in ONE_OF_ALL.items() if count > 1 else ():
                odd = request_of(own[0], sampling, options.tokens, drafts=drafts, mode=mode)
                others = [request_of(each, FREE, options.tokens, drafts=drafts) for each in own[1:]]
                note(f"one of all: {case}", count, drafting, [odd, *others], 1)
        show(f"repeat {repeat + 1} of {options.repeats}")
    return rows_of(rates)


def rows_of(rates: dict[tuple[str, int, str], list[float]]) -> list[dict[str, Any]]:
    """Median rates, with their ratios to the same without the parameter and, for forms, to plain decoding."""
    medians = {key: statistics.median(values) for key, values in rates.items()}
    rows = []
    for (case, count, drafting), rate in medians.items():
        without = "one of all: none" if case.startswith("one of all") else "seeded" if "seeded" in case else "none"
        beside = medians[without, count, "plain" if case == "form" else drafting]
        row = {"case": case, "concurrency": count, "drafting": drafting, "tokens_per_second": rate}
        rows.append(row | {"ratio": rate / beside, "rates": rates[case, count, drafting]})
        show(f"{case:28} c={count:<3} {drafting:7} {rate:9.1f} tokens/s  {rate / beside:.3f}")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=comma_separated(int), default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    config = TargetConfig(
        model=options.model, device=options.device, max_running=max(32, *options.concurrency), prefix_cache=False
    )
    runner = load_model(config)
    prompts = read_prompts(options.model, 0)
    random.Random(0).shuffle(prompts)
    engine = Engine(runner, config, step_cost=measure_step_cost(runner, config.step_rows))
    try:
        rows = measured(MeasuredEngine(engine), prompts, options)
    finally:
        engine.stop()
    write_json(options.json, {**describe(), "settings": settings_of(options), "rows": rows})


if __name__ == "__main__":
    main()
