"""Runs an engine in this process, with or without a draft, and measures its steps under a load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.step_recorder import StepRecorder, summarise
from benchmarks.shared.workload import Prompt
from outrider.drafting.events import DraftEvents
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import StoppableLink
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, SequenceTotals, StepVerdict
from target_service.engine.engine import Engine
from target_service.model.runner import ModelRunner
from target_service.speculation.policy.step_cost import measure_step_cost

# Links a draft to an engine, given the receiver of its events and the size of the vocabulary.
Connect = Callable[[DraftEvents, int], StoppableLink]
# The answer to each prompt.
Outputs = dict[Prompt, tuple[int, ...]]

_TIMEOUT_SECONDS = 600.0
# Tokens of the answers that warm a load up. An adaptive engine also has to learn what steps take, so its warm-up is
# longer and is repeated until drafts are used, at most so many times.
_WARM_UP, _WARM_UP_ADAPTIVE = 16, 160
_MOST_WARM_UPS = 8


class SimulatedRun:
    """One engine. Each load is run twice, first briefly, so that everything it needs is compiled and captured."""

    def __init__(self, runner: ModelRunner, config: TargetConfig, connect: Connect | None, settle: float = 0.0) -> None:
        """Waits until the draft is connected. Each load is repeated for `settle` seconds before it is measured."""
        self._events = EngineEvents(self._collect)
        self._outputs: dict[int, list[int]] = {}
        self._recorder = StepRecorder()
        adaptive = connect is not None and config.row_budget == "adaptive"
        self._warm_up, self._most_warm_ups = (_WARM_UP_ADAPTIVE, _MOST_WARM_UPS) if adaptive else (_WARM_UP, 1)
        self._settle = settle
        cost = measure_step_cost(runner, config.step_rows) if adaptive else None
        self._engine = Engine(runner, config, step_cost=cost, observer=self._recorder)
        self._link: StoppableLink | None = None
        if connect is not None:
            self._link = connect(self._engine.drafting, runner.vocabulary_size)
            self._engine.drafting.attach(self._link)
        self._drafted = connect is not None
        self._engine.start(self._events.deliver)
        self._wait_for_draft()

    def measure(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[dict[str, Any], Outputs]:
        """Answer all prompts at once. Returns figures and answers."""
        until = time.monotonic() + self._settle
        for _ in range(self._most_warm_ups):
            _, totals = self._answer(prompts, min(self._warm_up, max_tokens))
            # One accepted token a prompt may be chance.
            if sum(one.accepted_tokens for one in totals) > len(prompts):
                break
        while time.monotonic() < until:
            self._answer(prompts, max_tokens)
        self._recorder.pop_steps()
        begin = time.perf_counter()
        outputs, totals = self._answer(prompts, max_tokens)
        seconds = time.perf_counter() - begin
        steps = summarise(self._recorder.pop_steps())
        # The step that ends a prompt verifies nothing.
        verified = sum(one.steps - 1 for one in totals)
        after = sum(one.completion_tokens - 1 for one in totals)
        decode = steps["decode"]
        figures: dict[str, Any] = {
            "tokens_per_second": round(decode["tokens"] / decode["seconds"], 2),
            "tokens_per_second_with_prompts": round(sum(map(len, outputs.values())) / seconds, 2),
            "seconds": round(seconds, 3),
            "tokens_per_step": round(after / max(1, verified), 3),
            "reached_by_depth": _reached(totals, verified),
            "fallback_steps": sum(one.fallback_steps for one in totals),
            "steps": steps,
        }
        return figures, outputs

    def close(self) -> None:
        self._engine.stop()
        if self._link is not None:
            self._link.stop()

    def _answer(self, prompts: Sequence[Prompt], max_tokens: int) -> tuple[Outputs, list[SequenceTotals]]:
        sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        first = max(self._outputs, default=0) + 1
        begun = dict(enumerate(prompts, first))
        self._outputs = {number: [] for number in begun}
        for number, prompt in begun.items():
            request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, max_tokens, speculate=self._drafted)
            self._engine.submit(request, number)
        totals = [self._events.wait().totals for _ in prompts]
        return {prompt: tuple(self._outputs[number]) for number, prompt in begun.items()}, totals

    def _collect(self, verdict: StepVerdict) -> None:
        self._outputs[verdict.sequence_id].extend(verdict.token_ids)

    def _wait_for_draft(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self._drafted and not self._engine.snapshot().draft_connected:
            if time.monotonic() > deadline:
                raise RuntimeError("the draft service was not connected in time")
            time.sleep(0.05)


def _reached(totals: Sequence[SequenceTotals], steps: int) -> list[float]:
    """[d]: share of verified steps that accepted a node at depth d + 1."""
    depth = max((len(one.accepted_by_depth) for one in totals), default=0)
    counts = [sum(one.accepted_by_depth[d] for one in totals if d < len(one.accepted_by_depth)) for d in range(depth)]
    return [round(count / max(1, steps), 4) for count in counts]
