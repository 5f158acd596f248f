"""Where greedy outputs in bf16 differ from those in fp32, and how near a tie the model was there.

    python -m benchmarks.engine.parity [--model MODEL] [--device cuda] [--prompts 14] [--json FILE]

Every prompt is answered in fp32 by plain decoding, which is the reference, and in the other dtype one at a time, all
at once, and with drafts. An output *departs* from the reference at its first other token. The gap there is the
difference of log-probability, in fp32, between the reference's token and the other one: passes of other shapes round
differently, and where the gap is no larger than rounding, either token is the model's own.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.machine import describe
from benchmarks.shared.report import parser_of, settings_of, show, write_json
from benchmarks.shared.workload import read_prompts
from outrider.drafting.link import connect_draft
from outrider.sampling import SamplingParams, TokenLogprobs, VerificationMode
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.engine import Engine
from target_service.speculation.policy.step_cost import measure_step_cost

# Of log-probability: twice the most by which rounding to bf16 moves a logit of magnitude 16 to 32.
NEAR_TIE = 0.25
CANDIDATES = 20
# By name: whether all prompts are answered at once, and whether with drafts.
RUNS = {"one at a time": (False, False), "at once": (True, False), "one at a time, with drafts": (False, True)}


class Answers:
    """Collects the tokens of sequences."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.events = EngineEvents(self._collect)
        self._finished: set[int] = set()

    def _collect(self, verdict: StepVerdict) -> None:
        self.tokens.setdefault(verdict.sequence_id, []).extend(verdict.token_ids)
        self.logprobs.setdefault(verdict.sequence_id, []).extend(verdict.logprobs)

    def wait(self, sequence_ids: Sequence[int]) -> None:
        while not self._finished.issuperset(sequence_ids):
            self._finished.add(self.events.wait().sequence_id)


class Model:
    """One loaded model with its engine."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine = engine
        self._answers = answers

    def answer(
        self, prompts: Sequence[tuple[int, ...]], count: int, *, together: bool, drafts: bool = False
    ) -> list[list[int]]:
        """Greedy tokens of every prompt."""
        ids = []
        for prompt in prompts:
            ids.append(self._submit(prompt, SamplingParams(max_tokens=count), count, drafts))
            if not together:
                self._answers.wait(ids[-1:])
        self._answers.wait(ids)
        return [self._answers.tokens[one] for one in ids]

    def gap(self, prefix: tuple[int, ...], chosen: int, other: int) -> float | None:
        """Log-probability of `chosen` after `prefix` less that of `other`; None where one is no candidate."""
        one = self._submit(prefix, SamplingParams(max_tokens=1, logprobs=CANDIDATES), 1, drafts=False)
        self._answers.wait([one])
        top = dict(self._answers.logprobs[one][0].top)
        return top[chosen] - top[other] if {chosen, other} <= top.keys() else None

    def _submit(self, prompt: tuple[int, ...], sampling: SamplingParams, count: int, drafts: bool) -> int:
        request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, count, speculate=drafts)
        return self._engine.submit(request)


@contextmanager
def loaded(options: argparse.Namespace, dtype: str) -> Iterator[Model]:
    config = TargetConfig(
        model=options.model, device=options.device, dtype=dtype, draft="inprocess:trie", kv_tokens=options.kv_tokens
    )
    answers, runner = Answers(), load_model(config)
    engine = Engine(runner, config, step_cost=measure_step_cost(runner, config.step_rows))
    link = connect_draft(config.draft, engine.drafting, runner.vocabulary_size, "")
    engine.drafting.attach(link)
    engine.start(answers.events.deliver)
    yield Model(engine, answers)
    engine.stop()
    link.stop()
    del engine, runner, link
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()


def departures(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    """(prompt, position, the reference's token, the other one) where an output departs from the reference."""
    found = []
    for index, (expected, output) in enumerate(zip(reference, other, strict=True)):
        pairs = enumerate(zip(expected, output, strict=False))
        position = next((i for i, (right, wrong) in pairs if right != wrong), None)
        if position is not None:
            found.append((index, position, expected[position], output[position]))
    return found


def summary(gaps: Sequence[float | None], outputs: int) -> dict[str, Any]:
    known = [gap for gap in gaps if gap is not None]
    near = sum(gap <= NEAR_TIE for gap in known)
    return {
        "outputs": outputs,
        "left": len(gaps),
        "near_ties": near,
        "others": len(gaps) - near,
        "median_gap": statistics.median(known) if known else None,
        "largest_gap": max(known, default=None),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=14, help="number of prompts, taken evenly from the tasks")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=32768)
    options = parser.parse_args()
    every = read_prompts(options.model, 0)
    prompts = every[:: max(1, len(every) // options.prompts)][: options.prompts]
    with loaded(options, "float32") as exact:
        reference = exact.answer(prompts, options.max_tokens, together=False)
        drafted = exact.answer(prompts, options.max_tokens, together=True, drafts=True)
    runs = {"float32, at once, with drafts": drafted}
    with loaded(options, options.dtype) as rounded:
        for name, (together, drafts) in RUNS.items():
            outputs = rounded.answer(prompts, options.max_tokens, together=together, drafts=drafts)
            runs[f"{options.dtype}, {name}"] = outputs
    results = {}
    with loaded(options, "float32") as exact:
        for name, outputs in runs.items():
            gaps = [
                exact.gap((*prompts[i], *reference[i][:at]), right, wrong)
                for i, at, right, wrong in departures(reference, outputs)
            ]
            results[name] = summary(gaps, len(prompts))
            show(f"{name}: {results[name]}")
    settings = settings_of(options)
    document = {"machine": describe(), "settings": settings, "near_tie": NEAR_TIE, "results": results}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
