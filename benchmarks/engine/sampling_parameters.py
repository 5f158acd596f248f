"""What penalties, log-probabilities and forms of output cost an engine: tokens per second of whole answers beside those
of the same requests without.

    python -m benchmarks.widened.model smollm2-135m-instruct smollm2-135m-instruct MODEL HEAD --shape 8b
    python -m benchmarks.engine.sampling_parameters --model MODEL [--parts all,beside,forms,first] [--json FILE]

The engine runs in this process, without clients. Waves of as many requests as the concurrency get the same prompts of
the shared file in every case; a wave's rate is all its tokens over the time from the first request to the last token,
prompts included. `plain` decodes without drafts, `lookup` with what the device drafts by itself. Graphs are captured
first, as an idle target does, and of each case one wave is not measured; then the cases take turns until `--seconds` of
a part have passed, each once at least. The parts:

- `all`: every request of a wave has the parameter; the ratio is to the same without.
- `beside`: one request of a wave has it, and the ratio is that of the others' rates.
- `forms`: forms of seven fields, by the tokens of the form, against unconstrained plain decoding; and free text held to
  a grammar that allows any, which is what masks alone cost.
- `first`: milliseconds to the first token of one request with a new form and with a kept one, the compilation for the
  check of the serving process included, beside requests without.

`--parameters` chooses among those of `all`. On a CPU (`--device cpu`, with a tiny model) this only rehearses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.machine import describe
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json
from benchmarks.shared.workload import Prompt, form_schema, read_prompts
from outrider.sampling import SamplingParams, VerificationMode
from outrider.structured_output import StructuredOutput
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.engine import Engine
from target_service.grammars.compiling import Grammars
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.step_cost import measure_step_cost

PARTS = ("all", "beside", "forms", "first")
FREE = SamplingParams(ignore_eos=True)


def form_of(number: int = 0) -> SamplingParams:
    """The form of seven fields; with another number one that was not compiled yet."""
    return SamplingParams(structured_output=StructuredOutput(json_schema=json.dumps(form_schema(number))))


FORM = form_of()
PARAMETERS: dict[str, SamplingParams] = {
    "none": FREE,
    "penalties": replace(FREE, presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.05),
    # Too small to change a text, so that drafts are accepted as often as without.
    "same-text-penalties": replace(FREE, presence_penalty=1e-6, frequency_penalty=1e-6, repetition_penalty=1 + 1e-9),
    "logprobs": replace(FREE, logprobs=5),
    "biases": replace(FREE, logit_bias={token: 0.5 for token in range(1000, 1100)}),
    "seeded": replace(FREE, temperature=0.8, seed=5),
    "seeded-penalties": replace(FREE, temperature=0.8, seed=5, presence_penalty=0.3, repetition_penalty=1.05),
}
# What one request of a wave has, beside others with nothing.
BESIDE: dict[str, tuple[SamplingParams, VerificationMode | None]] = {
    "none": (FREE, None),
    "penalties": (PARAMETERS["penalties"], None),
    "logprobs": (PARAMETERS["logprobs"], None),
    "form": (FORM, None),
    "rejection": (PARAMETERS["seeded"], VerificationMode.REJECTION),
}
FORMS: dict[str, SamplingParams] = {
    "none": FREE,
    "form": FORM,
    # Its end is held back for as long as the others' is.
    "any text": SamplingParams(structured_output=StructuredOutput(regex="(?s:.*)")),
}
# Requests of the part `first` at least, of each kind.
_FIRST_TOKENS = 5


@dataclass(frozen=True)
class Wave:
    """Of a wave's requests, in their order: tokens, the passes that brought them, and seconds until each had its first
    and its last one."""

    tokens: tuple[int, ...]
    passes: tuple[int, ...]
    first: tuple[float, ...]
    last: tuple[float, ...]

    def rate(self, begin: int = 0) -> float:
        """Tokens per second of the requests from `begin` on."""
        return sum(self.tokens[begin:]) / max(self.last[begin:])

    def per_pass(self, begin: int = 0) -> tuple[float, float]:
        """Tokens that a pass brings one request, and milliseconds of a pass behind the first, of requests from `begin`
        on."""
        seconds = sum(self.last[begin:]) - sum(self.first[begin:])
        passes = sum(self.passes[begin:])
        return sum(self.tokens[begin:]) / passes, 1e3 * seconds / max(1, passes - len(self.passes[begin:]))


class MeasuredEngine:
    """An engine that counts the tokens of its sequences."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens: dict[int, int] = {}
        self._passes: dict[int, int] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._events = EngineEvents(self._count)
        begin = time.monotonic()
        while engine.use_pause():
            pass
        show(f"captured what some requests need in {time.monotonic() - begin:.1f} s")
        engine.start(self._events.deliver)

    def _count(self, verdict: StepVerdict) -> None:
        now = time.perf_counter()
        self._tokens[verdict.sequence_id] = self._tokens.get(verdict.sequence_id, 0) + len(verdict.token_ids)
        self._passes[verdict.sequence_id] = self._passes.get(verdict.sequence_id, 0) + verdict.passes
        self._first.setdefault(verdict.sequence_id, now)
        self._last[verdict.sequence_id] = now

    def wave(self, requests: Sequence[SequenceRequest], check: Callable[[], None] = lambda: None) -> Wave:
        """Run these together; `check` counts as part of them."""
        begin = time.perf_counter()
        check()
        ids = [self._engine.submit(request) for request in requests]
        for _ in ids:
            self._events.wait()
        tokens, passes = (tuple([counts.pop(each) for each in ids]) for counts in (self._tokens, self._passes))
        first, last = ([times.pop(each) - begin for each in ids] for times in (self._first, self._last))
        return Wave(tokens, passes, tuple(first), tuple(last))


def request_of(
    prompt: Prompt, sampling: SamplingParams, tokens: int, *, drafts: bool, mode: VerificationMode | None = None
) -> SequenceRequest:
    return SequenceRequest(prompt, sampling, sampling.mode(mode), sampling.seed or 0, tokens, speculate=drafts)


@dataclass(frozen=True)
class MeasuredCase:
    """What is measured again and again: requests that begin with some prompt of those given."""

    part: str
    name: str
    concurrency: int
    drafting: str
    requests: Callable[[Sequence[Prompt]], list[SequenceRequest]]
    # The name and drafting of the case that it is compared with, at the same concurrency.
    compared: tuple[str, str]

    @property
    def counted_from(self) -> int:
        """The place of the first request whose tokens count."""
        return int(self.part == "beside")


def cases_of(part: str, options: argparse.Namespace) -> list[MeasuredCase]:
    """The cases of a part, those that others are compared with first."""
    cases = []
    for count, drafting in itertools.product(options.concurrency, ("plain", "lookup")):
        drafts = drafting == "lookup"

        def together(sampling: SamplingParams, drafts: bool = drafts) -> Callable[[Sequence[Prompt]], Any]:
            return lambda own: [request_of(each, sampling, options.tokens, drafts=drafts) for each in own]

        def beside(one: SamplingParams, mode: Any, drafts: bool = drafts) -> Callable[[Sequence[Prompt]], Any]:
            return lambda own: [
                request_of(own[0], one, options.tokens, drafts=drafts, mode=mode),
                *[request_of(each, FREE, options.tokens, drafts=drafts) for each in own[1:]],
            ]

        if part == "all":
            for name in dict.fromkeys(("none", *options.parameters)):
                without = "seeded" if name == "seeded-penalties" and "seeded" in options.parameters else "none"
                cases.append(MeasuredCase(part, name, count, drafting, together(PARAMETERS[name]), (without, drafting)))
        elif part == "beside" and count > 1 and count == max(options.concurrency):
            for name, (one, mode) in BESIDE.items():
                cases.append(MeasuredCase(part, name, count, drafting, beside(one, mode), ("none", drafting)))
        elif part == "forms":
            for name, sampling in FORMS.items():
                against = "plain" if name == "form" else drafting
                if name == "any text":
                    sampling = replace(sampling, min_tokens=options.tokens)
                cases.append(MeasuredCase(part, name, count, drafting, together(sampling), ("none", against)))
    return cases


def measured(
    engine: MeasuredEngine, cases: Sequence[MeasuredCase], prompts: Sequence[Prompt], seconds: float
) -> list[Any]:
    """A row for each case: its rates, their median, and the median of the ratios within a turn."""
    waves: dict[MeasuredCase, list[Wave]] = {each: [] for each in cases}
    begin, turn = time.monotonic(), 0
    for case in cases:
        engine.wave(case.requests(prompts[: case.concurrency]))
    while not turn or time.monotonic() - begin < seconds:
        for case in cases:
            first = turn * case.concurrency
            own = [prompts[(first + place) % len(prompts)] for place in range(case.concurrency)]
            waves[case].append(engine.wave(case.requests(own)))
        turn += 1
    return rows_of(waves)


def rows_of(waves: dict[MeasuredCase, list[Wave]]) -> list[dict[str, Any]]:
    """Rates, with their ratios to those of the compared case in the same turn, which had the same prompts."""
    rates = {case: [each.rate(case.counted_from) for each in own] for case, own in waves.items()}
    by_name = {(case.name, case.concurrency, case.drafting): values for case, values in rates.items()}
    rows = []
    for case, values in rates.items():
        name, drafting = case.compared
        ratios = [own / other for own, other in zip(values, by_name[name, case.concurrency, drafting], strict=True)]
        rate, ratio = statistics.median(values), statistics.median(ratios)
        tokens, milliseconds = zip(*[each.per_pass(case.counted_from) for each in waves[case]], strict=True)
        per_pass, pass_ms = statistics.median(tokens), statistics.median(milliseconds)
        rows.append(
            {
                "part": case.part, "case": case.name, "concurrency": case.concurrency, "drafting": case.drafting,
                "tokens_per_second": rate, "ratio": ratio, "rates": values, "ratios": ratios,
                "tokens_per_pass": per_pass, "pass_ms": pass_ms,
            }
        )  # fmt: skip
        spread = f"{min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)}"
        show(
            f"{case.part:7} {case.name:16} c={case.concurrency:<3} {case.drafting:7} {rate:9.1f} tokens/s  "
            f"{ratio:.3f} ({spread}) {per_pass:.2f} tokens in passes of {pass_ms:.2f} ms"
        )
    return rows


def first_tokens(
    engine: MeasuredEngine, grammars: Grammars, prompts: Sequence[Prompt], seconds: float
) -> list[dict[str, Any]]:
    """Milliseconds to the first token of single requests without a form, with a kept and with a new one; `grammars`
    are those of the serving process."""
    times: dict[str, list[float]] = {"none": [], "kept form": [], "new form": []}
    begin = time.monotonic()
    for number in itertools.count():
        if number > _FIRST_TOKENS and time.monotonic() - begin > seconds:
            break
        for name, values in times.items():
            sampling = {"none": FREE, "kept form": FORM}.get(name) or form_of(1 + number)

            def check(form: StructuredOutput | None = sampling.structured_output) -> None:
                if form is not None and not grammars.keeps(form, "bench"):
                    grammars.check(form, "bench")

            one = replace(request_of(prompts[number % len(prompts)], sampling, 1, drafts=False), tenant="bench")
            values.append(1000 * engine.wave([one], check).first[0])
    rows = []
    for name, values in times.items():
        # The first compiles the vocabulary too.
        later = [after - before for after, before in zip(values[1:], times["none"][1:], strict=True)]
        rows.append(
            {"part": "first", "case": name, "milliseconds": statistics.median(values[1:]), "all": values[1:],
             "later": statistics.median(later), "vocabulary": values[0]}
        )  # fmt: skip
        show(f"first   {name:16} {rows[-1]['milliseconds']:.2f} ms, {rows[-1]['later']:.2f} later, of {len(later)}")
    return rows


def measure(runner: ModelRunner, config: TargetConfig, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all parts that were asked for."""
    prompts = read_prompts(options.model, 0)
    random.Random(0).shuffle(prompts)
    grammars = Grammars(runner.tokenizer, runner.vocabulary_size, runner.end_token_ids)
    engine, rows = Engine(runner, config, step_cost=measure_step_cost(runner, config.step_rows)), list[dict[str, Any]]()
    counting = MeasuredEngine(engine)
    try:
        for part in options.parts:
            begin = time.monotonic()
            if part == "first":
                rows += first_tokens(counting, grammars, prompts, options.seconds)
            else:
                rows += measured(counting, cases_of(part, options), prompts, options.seconds)
            show(f"{part}: {time.monotonic() - begin:.0f} s")
            # What there is, should a later part not come to its end.
            write_json(options.json, {**describe(), "settings": settings_of(options), "rows": rows})
    finally:
        engine.stop()
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", type=comma_separated(str), default=list(PARTS))
    parser.add_argument(
        "--parameters", type=comma_separated(str), default=["penalties", "same-text-penalties", "logprobs"]
    )
    parser.add_argument("--concurrency", type=comma_separated(int), default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seconds", type=float, default=25.0, help="of each part, if every case was measured once")
    options = parser.parse_args()
    if unknown := {*options.parts} - {*PARTS} | {*options.parameters} - {*PARAMETERS}:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    config = TargetConfig(
        model=options.model, device=options.device, max_running=max(32, *options.concurrency), prefix_cache=False
    )
    begin = time.monotonic()
    runner = load_model(config)
    show(f"loaded in {time.monotonic() - begin:.0f} s")
    measure(runner, config, options)


if __name__ == "__main__":
    main()
