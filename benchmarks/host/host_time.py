"""The time that the engine's thread takes for a step whose rows a device chooses, by what it does, without a device.

    python -m benchmarks.host.host_time [--sequences 1,8,32] [--steps 300] [--json FILE]

Loop, scheduler, policies, packing and commits are the engine's own. The pass is not run: a step ends `--pass-ms` after
the one before it, with reports that are made up, and a draft answers every commit while the next pass but one runs. So
the figures are those of the host alone, of a machine like this one: medians over `--steps` steps, after `--warm-up`
others in which the policies learn. The host's part must fit into a pass, or the device waits for it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.engine.simulated_device import PAGE_SIZE, empty_runner
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
from outrider.drafting.events import Connected, DraftEvents, Grown
from outrider.runtime import settled
from outrider.sampling import SamplingParams, VerificationMode
from outrider.wire.frames import DraftInfo, OpenSequence, SequenceAdvance, SequenceFeatures, SequenceGrowth, TreeLimits
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest
from target_service.engine.loop import EngineLoop
from target_service.engine.step import Step
from target_service.execution.batch import StepBatch
from target_service.execution.device_executor import DeviceSteps
from target_service.execution.device_rows import TableStep
from target_service.execution.device_time import DeviceSpan
from target_service.execution.host_executor import Launched, LaunchedWhole, Ready
from target_service.execution.post_pass import TableWork
from target_service.execution.pre_pass import PrePass
from target_service.execution.prompt_scores import ScoredPrompt
from target_service.model.cuda_graphs.sizes import buckets_up_to, choose_bucket
from target_service.model.cuda_graphs.step_buffer import StepBuffer
from target_service.model.forward import ForwardInput, ForwardPass
from target_service.model.runner import ModelRunner
from target_service.sampling.verifier import SequenceVerifier, Verified
from target_service.speculation.policy.step_cost import StepCost
from target_service.telemetry.metrics import PrometheusObserver
from tree_kernels.attention.triton_backend import TritonAttention
from tree_kernels.attention.triton_planning import TritonSettings
from tree_kernels.logit_shaping import SequenceTexts
from tree_kernels.node_table import StepIntegers
from tree_kernels.node_table.layout import EXPECTED_UNIT, PROSPECTS, REPORT_ROWS, REPORT_TOKENS, ReportField

VOCABULARY = 1000
# Tokens of every prompt, and places of every sequence in the cache.
_PROMPT, _LONGEST = 512, 1 << 12
# Nodes of a growth, a chain, and how many chains there are.
_NODES, _CHAINS = 24, 64
# Accepted rows of a pass and sequence: of each as often as here. Their mean is what heads make of 32 sequences.
_ACCEPTED = (0, 0, 1, 1, 2, 3)
# Expected tokens of the best 1, 3, 7 .. rows.
_PROSPECTS = (0.5, 0.9, 1.3, 1.5, 1.6, 1.6)
# Seconds of a pass by its rows, as a multiple of `--pass-ms`.
COSTS = ((1, 0.9), (32, 0.95), (64, 1.0), (128, 1.05), (256, 1.4), (512, 2.2))


class Times:
    """Nanoseconds by phase, of every step."""

    def __init__(self) -> None:
        self.ns: defaultdict[str, list[int]] = defaultdict(list)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, whose time counts as that of `phase`."""

        def run(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter_ns()
            try:
                return call(*arguments, **options)
            finally:
                self.ns[phase].append(time.perf_counter_ns() - begin)

        return run


class _TimedStep(LaunchedWhole):
    """A step of `HostOnly`; see `Launched`. It has ended at a time."""

    on_device = True
    span: DeviceSpan | None = None

    def __init__(self, launched: Launched, ends_at: float, times: Times) -> None:
        self._launched, self._ends_at = launched, ends_at
        self.can_launch_before_results = launched.can_launch_before_results
        chosen = isinstance(launched, TableStep)
        self._outcomes = times.timed("outcomes", launched.outcomes) if chosen else launched.outcomes

    def wait(self) -> None:
        """See `Launched.wait`."""
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))

    def ended(self) -> bool:
        """See `Launched.ended`."""
        return time.perf_counter() >= self._ends_at

    def outcomes(self) -> list[Verified | None]:
        """See `Launched.outcomes`."""
        self.wait()
        outcomes: list[Verified | None] = self._outcomes()
        return outcomes

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`."""
        return self._launched.prompt_logprobs()


class HostRunner(ModelRunner):
    """Loads steps as captured ones are loaded, and runs none."""

    times: Times

    def prepare(self, times: Times, max_sequences: int, max_rows: int, longest: int = _LONGEST) -> None:
        """Time what is loaded; for steps of at most so many sequences and rows, and keys of a sequence."""
        self.times, self._longest = times, longest
        self._sizes = buckets_up_to(max_rows, max_sequences)
        self._verified = max_sequences, max_rows
        self._buffers: dict[Any, StepBuffer] = {}
        self._planner = TritonAttention(torch.device("cpu"), TritonSettings(processors=132))
        nothing = torch.zeros(1, dtype=torch.int32)
        step = StepIntegers(*[nothing] * 11)
        texts = SequenceTexts(nothing, 1, nothing, nothing, nothing, nothing)
        self._done = ForwardPass(torch.zeros(1, 1), nothing, nothing, nothing, nothing, texts, step=step)

    def run_pass(self, batch: ForwardInput, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """See `ModelRunner.run_pass`."""
        bucket = choose_bucket(self._sizes, batch.attention, batch.room)
        assert bucket is not None, "one is as large as any step"
        if bucket not in self._buffers:
            pages_each = self.cache.pages_for(self._longest)
            self._buffers[bucket] = StepBuffer(
                bucket, self._planner, self.device, PAGE_SIZE, pages_each, self._verified
            )
        load = self._buffers[bucket].load
        if batch.room:
            load = self.times.timed("load", load)
        load(batch, self._last_position, parameters)
        return self._done

    def run_after(self, batch: ForwardInput, _accepted: Tensor, parameters: NDArray[numpy.int32]) -> ForwardPass:
        """See `ModelRunner.run_after`."""
        return self.run_pass(batch, parameters)

    def run_device_rows(
        self,
        batch: ForwardInput,
        parameters: NDArray[numpy.int32],
        begin: Callable[[StepIntegers, object | None], None],
    ) -> ForwardPass:
        """See `ModelRunner.run_device_rows`."""
        done = self.run_pass(batch, parameters)
        assert done.step is not None
        begin(done.step, None)
        return done

    def run_again(self, batch: ForwardInput, done: ForwardPass) -> ForwardPass:
        """See `ModelRunner.run_again`."""
        del batch
        return done


class _NoRows(PrePass):
    """Chooses no rows: a device does that."""

    def launch(self, *_: object) -> None:
        """See `PrePass.launch`."""


class HostOnly(DeviceSteps):
    """`Steps` whose passes are reported, and not run."""

    def __init__(
        self,
        runner: HostRunner,
        times: Times,
        one_pass: Callable[[int], float],
        max_sequences: int,
        max_rows: int,
        accepted: Sequence[int] = _ACCEPTED,
    ) -> None:
        """`one_pass` has the seconds of a pass by its rows; each of `accepted` is as frequent as it stands there."""
        super().__init__(runner, max_sequences=max_sequences, max_rows=max_rows, backend="torch")
        assert runner.node_table is not None and self.tables is not None
        self._pre_pass = _NoRows(runner, runner.node_table, self.tables.mail)
        # Passes take time, but not the host's.
        self.in_background = True
        self._times, self._one_pass, self._accepted = times, one_pass, accepted
        self._begun, self._free_at = 0, 0.0
        # Called behind each launch.
        self.launched: Callable[[], None] = lambda: None
        self._random = numpy.random.default_rng(1)

    def launch(self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> Launched:
        """See `Steps.launch`."""
        self._begun = time.perf_counter_ns()
        launched = super().launch(batch, verifiers, passes, ready)
        self.launched()
        rows = batch.device_rows.rows if batch.device_rows is not None else len(batch.input.token_ids)
        self._free_at = max(self._free_at, time.perf_counter()) + passes * self._one_pass(rows)
        return _TimedStep(launched, self._free_at, self._times)

    def _launch_device_rows(self, *arguments: Any) -> Launched:
        self._times.ns["launch"].append(time.perf_counter_ns() - self._begun)
        return super()._launch_device_rows(*arguments)

    def _conclude(
        self, batch: StepBatch, rows: Any, done: Any, table: TableWork = TableWork.NONE
    ) -> Callable[[], None]:
        """Make up what the pass would have reported."""
        del rows, done
        count, verdicts = len(batch.items), self._verifier.verdicts
        tokens = self._random.integers(0, VOCABULARY, (count, REPORT_ROWS - REPORT_TOKENS))
        verdicts.next_tokens[:count] = torch.from_numpy(tokens[:, 0])
        verdicts.accepted_counts.zero_()
        if table is TableWork.NONE:
            return _draft_nothing
        assert batch.device_rows is not None and self._runner.node_table is not None
        reports = self._runner.node_table.reports.numpy()[:count]
        each = max(1, (batch.device_rows.rows - batch.device_rows.laid_out_rows) // count - 1)
        accepted = numpy.minimum(self._random.choice(self._accepted, count), each)
        accepted[: batch.device_rows.laid_out] = 0
        for passes in range(reports.shape[1]):
            report = reports[:, passes]
            report[:, ReportField.ACCEPTED], report[:, ReportField.DRAFTED] = accepted, each
            report[:, ReportField.DRAFTED_FROM_TABLE], report[:, ReportField.ACCEPTED_FROM_TABLE] = each, accepted
            report[:, ReportField.EXPECTED] = report[:, ReportField.EXPECTED_FROM_TABLE] = EXPECTED_UNIT
            report[:, ReportField.FIRST_ROW] = numpy.arange(count) * (1 + each)
            first = ReportField.FIRST_PROSPECT
            report[:, first : first + len(PROSPECTS)] = numpy.array(_PROSPECTS) * EXPECTED_UNIT
            report[:, REPORT_TOKENS:REPORT_ROWS] = tokens
            report[:, REPORT_ROWS:] = numpy.arange(1, 1 + report.shape[1] - REPORT_ROWS)
        return _draft_nothing


def _draft_nothing() -> None:
    """Nothing drafts behind these passes."""


class ChainDraft:
    """A `DraftLink` whose growths are chains of random tokens, each for the commit before the last one."""

    def __init__(self, events: DraftEvents) -> None:
        self._events, dice = events, random.Random(2)
        # Drawn once: that is no work of an engine's.
        self._tokens = [tuple(dice.choices(range(VOCABULARY), k=_NODES)) for _ in range(_CHAINS)]
        self._ids: dict[int, int] = {}
        self._late: list[SequenceGrowth] = []
        self._due: list[SequenceGrowth] = []
        events.receive(Connected(DraftInfo("chains", 0, "", TreeLimits(), 1 << 20, "0")))

    def open(self, sequence: OpenSequence) -> None:
        self._ids.setdefault(sequence.sequence_id, 1)
        self._late = [growth for growth in self._late if growth.sequence_id != sequence.sequence_id]
        self._due = [growth for growth in self._due if growth.sequence_id != sequence.sequence_id]
        self._events.receive(Grown([self._growth(sequence.sequence_id, sequence.step)]))

    def advance(self, advances: Sequence[SequenceAdvance]) -> None:
        self._due += self._late
        self._late = [self._growth(one.sequence_id, one.step) for one in advances]

    def deliver(self) -> None:
        """Send what is due."""
        due, self._due = self._due, []
        if due:
            self._events.receive(Grown(due))

    def send_features(self, features: Sequence[SequenceFeatures]) -> None:
        raise AssertionError(f"{len(features)} features for a draft that reads none")

    def close(self, sequence_ids: Sequence[int]) -> None:
        """Nothing is kept that grows."""

    def cut_off(self, reason: str) -> None:
        raise AssertionError(reason)

    def _growth(self, sequence_id: int, step: int) -> SequenceGrowth:
        first = self._ids[sequence_id]
        self._ids[sequence_id] += _NODES
        parents = (0, *range(first, first + _NODES - 1))
        tokens = self._tokens[first // _NODES % _CHAINS]
        return SequenceGrowth(sequence_id, step, first, parents, tokens, (0.7,) * _NODES, replaces=True)


def _watch(loop: EngineLoop, steps: HostOnly, times: Times) -> None:
    """Time the parts of the loop's step."""
    for phase, of, name in (
        ("commit", loop, "_commit"),
        ("learn", loop.speculation.updates, "observe_outcomes"),
        ("observe", loop, "_observe"),
    ):
        setattr(of, name, times.timed(phase, getattr(of, name)))
    begin, committed = 0, 0
    launch_after, launch, commit, collect = (
        loop.launcher.launch_behind,
        steps.launch,
        loop._commit,
        loop.drafting.collect,
    )

    def noted(step: Step) -> Step | None:
        nonlocal begin
        begin = time.perf_counter_ns()
        return launch_after(step)

    def launched(*arguments: Any) -> Launched:
        times.ns["schedule"].append(time.perf_counter_ns() - begin)
        return launch(*arguments)

    def committing(*arguments: Any) -> Any:
        nonlocal committed
        verdicts = commit(*arguments)
        committed = time.perf_counter_ns()
        return verdicts

    def collecting(*arguments: Any) -> None:
        times.ns["move on"].append(time.perf_counter_ns() - committed)
        collect(*arguments)

    setattr(loop.launcher, "launch_behind", noted)  # noqa: B010
    setattr(loop, "_commit", committing)  # noqa: B010
    setattr(loop.drafting, "collect", collecting)  # noqa: B010
    setattr(steps, "launch", launched)  # noqa: B010


def measure(sequences: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds by phase of a step of so many sequences: the median and the distance between the quartiles."""
    times, one_pass = Times(), options.pass_ms * 1e-3
    config = TargetConfig(
        model="none", draft="inprocess:none", max_running=sequences, speculative_disable_queue_size=2 * sequences
    )
    runner: Any = empty_runner(VOCABULARY, sequences * _LONGEST)
    runner.__class__ = HostRunner
    runner.prepare(times, sequences, config.step_rows)
    runner.enable_device_row_selection(sequences, backend="torch")
    steps = HostOnly(runner, times, lambda _: one_pass, sequences, config.step_rows)
    cost = StepCost([(rows, share * one_pass) for rows, share in COSTS])
    loop = EngineLoop(runner, config, steps=steps, step_cost=cost, observer=PrometheusObserver("none", "none", "0"))
    draft = ChainDraft(loop.drafting)
    steps.launched = draft.deliver
    loop.drafting.attach(draft)
    loop.drafting.listen()
    rng = random.Random(3)
    sampling = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=_LONGEST)
    for number in range(1, sequences + 1):
        prompt = tuple(rng.choices(range(VOCABULARY), k=_PROMPT))
        request = SequenceRequest(prompt, sampling, VerificationMode.GREEDY, 0, _LONGEST)
        loop.add(loop.make(number, request))
    _watch(loop, steps, times)
    with settled():
        for number in range(options.warm_up + options.steps):
            if number == options.warm_up:
                times.ns.clear()
            loop.step()
    if len(loop.live) < sequences or not loop.drafting.has_open_sequences:
        raise SystemExit("a sequence ended, or its draft is not followed: what was timed is no usual step")
    found = {phase: median_and_spread([ns / 1000 for ns in each]) for phase, each in times.ns.items()}
    return {
        phase: {"median": round(median, 1), "spread": round(spread, 1)} for phase, (median, spread) in found.items()
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", default="1,8,32", type=comma_separated(int))
    parser.add_argument("--pass-ms", type=float, default=8.3)
    parser.add_argument("--warm-up", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for sequences in options.sequences:
        phases = measure(sequences, options)
        total = round(sum(figures["median"] for figures in phases.values()), 1)
        results.append({"sequences": sequences, "microseconds": phases, "sum_of_medians": total})
        rows = [{"phase": phase, **figures} for phase, figures in phases.items()]
        show(f"{sequences} sequences, microseconds, {total} in all\n{record_table(rows)}")
    write_json(options.json, {**provenance("host.host_time"), "settings": settings_of(options), "results": results})


if __name__ == "__main__":
    main()
