"""The processor time that the engine's thread takes for a step of forms, by what it does, without a device.

    python -m benchmarks.host.form_time [--sequences 1,8,32] [--waves 6] [--rows 128] [--free] [--json FILE]

As `host_time`, but every sequence fills in a form of seven fields, with the tokens of SmolLM2 and a grammar as the
service compiles it. The rows of a pass are those of least cost in the tables that the engine has published by then,
beside chains as lookup finds them; accepted are those that agree with an answer that was drawn beforehand. Choosing and
verifying rows is the device's work and does not count, nor do copies to it. A pass has `--rows`, or 16 of one sequence,
32 of eight and 64 of 32, whatever the row policy would choose by times that others on the machine change. Sequences
begin together in waves, of which the first is not counted, and steps count in which all of them decode. `--free` has
the same texts without a form.

Times are of processors. Of the engine's thread, `engine` is a step's and the other phases are its parts; the `other
threads` compute masks. Other processes on the machine take caches and halves of cores, which shows in processor time
too: a fixed loop is timed behind every step, and the figures are medians over the quarter of the steps behind which it
was fastest. `loop_us` says how fast that was.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.sampling_parameters import FORM, FREE
from benchmarks.engine.simulated_device import PAGE_SIZE
from benchmarks.host.host_time import COSTS, HostRunner, Times
from benchmarks.host.simulated_forms import FormSteps, form_answer
from benchmarks.shared.loaded_models import runner_for
from benchmarks.shared.report import (
    comma_separated,
    median_and_spread,
    parser_of,
    provenance,
    record_table,
    settings_of,
    show,
    write_json,
)
from outrider.runtime import settled
from outrider.sampling import VerificationMode
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine import launching
from target_service.engine.loop import EngineLoop
from target_service.grammars import following
from target_service.grammars.following import FollowedGrammar
from target_service.model.loading.store import resolve
from target_service.speculation.policy.step_cost import StepCost
from target_service.telemetry.metrics import PrometheusObserver
from target_service.text.loading import load_tokenizer

MODEL, END = "smollm2-135m-instruct", 2
# Of a fixed loop that takes some 50 us of a processor by itself, and the share of steps that count by it.
_LOOP, _COUNTED = 1000, 0.25
# Tokens of every prompt.
_PROMPT = 48


class Phases:
    """Processor time of one thread by phase, each without what others within it take, step by step."""

    def __init__(self) -> None:
        # Nanoseconds by phase, of every step that counts.
        self.steps: list[dict[str, int]] = []
        self._now: defaultdict[str, int] = defaultdict(int)
        self._stack: list[str] = []
        self._since = 0

    def _switch(self) -> None:
        now = time.thread_time_ns()
        if self._stack:
            self._now[self._stack[-1]] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is done within counts as this phase."""
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def device(self) -> Any:
        """What a device would do."""
        return self.phase("device")

    def timed(self, of: Any, name: str, phase: str) -> None:
        """Have the calls of a method or function count as a phase."""
        call: Callable[..., Any] = getattr(of, name)

        def run(*arguments: Any, **options: Any) -> Any:
            with self.phase(phase):
                return call(*arguments, **options)

        setattr(of, name, run)

    def end_step(self, others: int, *, counts: bool) -> None:
        """A step has ended, for which other threads took so many nanoseconds."""
        now, self._now = self._now, defaultdict(int)
        if not counts:
            return
        del now["device"]
        self.steps.append({**now, "engine": sum(now.values()), "other threads": others})


def runner_of(sequences: int) -> tuple[Any, Any]:
    """A runner that runs nothing, with the tokenizer."""
    tokenizer = load_tokenizer(resolve(MODEL))
    config = LlamaConfig(
        vocab_size=49152, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, eos_token_id=END,
    )  # fmt: skip
    pages = sequences * 512 // PAGE_SIZE
    runner = runner_for(LlamaForCausalLM(config), tokenizer, num_pages=pages, page_size=PAGE_SIZE, max_context=1 << 14)
    return runner, tokenizer


class FormBench:
    """One engine over a simulated device, whose sequences fill in forms."""

    def __init__(self, sequences: int, options: Any) -> None:
        self._sequences, self._free = sequences, options.free
        one_pass = options.pass_ms * 1e-3
        config = TargetConfig(model="none", max_running=sequences, prefix_cache=False)
        self.runner, self.tokenizer = runner_of(sequences)
        self.runner.__class__ = HostRunner
        self.runner.prepare(Times(), sequences, config.step_rows, 512)
        self.runner.enable_device_row_selection(sequences, backend="torch")
        self.phases = Phases()
        cost = StepCost([(rows, share * one_pass) for rows, share in COSTS])
        steps = FormSteps(self.runner, lambda rows: cost(rows), sequences, config.step_rows, self.phases.device)
        self.steps = steps
        observer = PrometheusObserver("none", "none", "0")
        self.loop = EngineLoop(self.runner, config, steps=steps, step_cost=cost, observer=observer)
        self._fix_rows(options.rows or min(16 * sequences, max(32, 2 * sequences)))
        self._watch()
        self._count, self._dice = 0, random.Random(3)
        # Of the steps that count: tokens, drafted rows, and nanoseconds of the fixed loop.
        self.tokens, self.rows, self.loops = list[int](), list[int](), list[int]()

    def _fix_rows(self, rows: int) -> None:
        controller = self.loop.speculation.controller
        setattr(controller, "uses_draft", lambda _load: True)  # noqa: B010
        setattr(controller.throughput_trial, "allows_rows", lambda _load: True)  # noqa: B010
        setattr(controller, "_tried", lambda sizes, *_: min(sizes, key=lambda size: abs(size - rows)))  # noqa: B010

    def _watch(self) -> None:
        loop, timed = self.loop, self.phases.timed
        timed(loop.launcher, "launch_behind", "launch")
        timed(loop.launcher, "launch_next", "launch")
        timed(loop, "_counted", "outcomes")
        timed(loop, "_commit", "commit")
        timed(loop, "_observe", "observe")
        timed(loop, "_finish", "events")
        timed(loop.speculation.updates, "observe_outcomes", "learn")
        assert self.steps.tables is not None
        timed(self.steps.tables, "publish", "publish")
        timed(self.steps._shaped, "mask", "masks: rest")
        timed(FollowedGrammar, "follow", "masks: trees")
        timed(following, "compute_masks", "masks: compute")
        timed(FollowedGrammar, "_masked", "masks: reached")
        timed(launching, "graft_expected", "expected text")

    def wave(self, *, counts: bool) -> None:
        """Fill in one form for each sequence."""
        sampling = FREE if self._free else FORM
        for _ in range(self._sequences):
            self._count += 1
            answer = [*self.tokenizer.encode(form_answer(self._dice)), END]
            words = [self.tokenizer.encode(form_answer(self._dice)) for _ in range(3)]
            prompt = tuple([token for each in words for token in each][:_PROMPT])
            self.steps.expect(self._count, prompt, answer)
            request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, len(answer), tenant="t")
            live = self.loop.make(self._count, request)
            self.loop.constrain(live)
            self.loop.add(live)
        while self.loop.live:
            self._step(counts=counts)

    def _step(self, *, counts: bool) -> None:
        others = time.process_time_ns() - time.thread_time_ns()
        with self.phases.phase("other"):
            events = self.loop.step() or []
        verdicts = [one for one in events if isinstance(one, StepVerdict)]
        counts = counts and len(verdicts) == self._sequences and all([self._decodes(one) for one in verdicts])
        self.phases.end_step(time.process_time_ns() - time.thread_time_ns() - others, counts=counts)
        if counts:
            self.tokens.append(sum([len(one.token_ids) for one in verdicts]))
            self.rows.append(sum([one.drafted_tokens for one in verdicts]))
            self.loops.append(fixed_loop_ns())

    def _decodes(self, verdict: StepVerdict) -> bool:
        """Whether a verdict is of neither the first nor the last tokens of its sequence."""
        live = self.loop.live.get(verdict.sequence_id)
        return live is not None and len(live.sequence.output) > len(verdict.token_ids)


def fixed_loop_ns() -> int:
    """Nanoseconds of a processor for always the same."""
    begin, total = time.thread_time_ns(), 0
    for number in range(_LOOP):
        total += number * number
    return time.thread_time_ns() - begin


def measure(sequences: int, options: Any) -> dict[str, Any]:
    """Microseconds by phase of a step of so many sequences."""
    bench = FormBench(sequences, options)
    with settled():
        for number in range(1 + options.waves):
            bench.wave(counts=number > 0)
    calm = sorted(range(len(bench.loops)), key=bench.loops.__getitem__)[: max(2, int(_COUNTED * len(bench.loops)))]
    figures = {}
    steps = [bench.phases.steps[step] for step in calm]
    for phase in {phase for step in steps for phase in step}:
        median, spread = median_and_spread([step.get(phase, 0) / 1000 for step in steps])
        figures[phase] = {"median": round(median, 1), "spread": round(spread, 1)}
    figures = dict(sorted(figures.items(), key=lambda each: -each[1]["median"]))
    return {
        "sequences": sequences,
        "steps": len(bench.tokens),
        "steps_counted": len(calm),
        "loop_us": round(statistics.median([bench.loops[step] for step in calm]) / 1000, 1),
        "tokens_each": round(statistics.mean(bench.tokens) / sequences, 2),
        "drafted_rows": round(statistics.mean(bench.rows), 1),
        "microseconds": figures,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", default="1,8,32", type=comma_separated(int))
    parser.add_argument("--pass-ms", type=float, default=7.0)
    parser.add_argument("--waves", type=int, default=6)
    parser.add_argument("--rows", type=int, help="of a pass")
    parser.add_argument("--free", action="store_true", help="the same texts without a form")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for sequences in options.sequences:
        found = measure(sequences, options)
        results.append(found)
        rows = [{"phase": phase, **each} for phase, each in found["microseconds"].items()]
        show(
            f"{sequences} sequences: {found['tokens_each']} tokens of each with {found['drafted_rows']} drafted rows, "
            f"{found['steps_counted']} of {found['steps']} steps\n{record_table(rows)}"
        )
    document = {**provenance("host.form_time", ["llguidance"]), "settings": settings_of(options), "results": results}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
