"""How the engine uses drafts on a simulated device that takes a given time for a pass: real texts and a real draft.

    python -m benchmarks.drafters.make_traces PROMPTS TRACES --per-task 4 --tokens 200
    outrider draft --drafter trie --listen unix:/tmp/draft &
    python -m benchmarks.engine.simulated_device TRACES --draft unix:/tmp/draft [--pass-ms 1.2] [--concurrency 1,8]

The engine's own loop schedules, chooses, waits and commits in real time; only the device is simulated. A pass ends
`--pass-ms` after the one before it, and `--row-ms` later for each row beyond one a sequence; a launch occupies the host
for `--host-ms` besides preparing it; the accepted rows are those that agree with the trace. So the choice between plain
steps and waiting for drafts can be tuned without a GPU; this device has no tables to choose rows from. A slow host has
longer round trips; choose longer passes there. Each text is decoded plain and with drafts, in turns, by
separate tenants; the first repeat, in which the engine learns, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.runtime import prepare_grpc, switch_threads_often

# Before anything imports gRPC, as in the services.
prepare_grpc()

import torch  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from benchmarks.drafters.draft_quality import Trace, load  # noqa: E402
from benchmarks.shared.loaded_models import runner_for  # noqa: E402
from benchmarks.shared.machine import describe  # noqa: E402
from benchmarks.shared.report import comma_separated, parser_of, settings_of, show, write_json  # noqa: E402
from outrider.drafting.link import connect_draft  # noqa: E402
from outrider.sampling import SamplingParams, VerificationMode  # noqa: E402
from outrider.tree import TokenTree  # noqa: E402
from target_service.config import TargetConfig  # noqa: E402
from target_service.core.sequence import SequenceRequest, StepVerdict  # noqa: E402
from target_service.engine.loop import EngineLoop  # noqa: E402
from target_service.execution.batch import StepBatch  # noqa: E402
from target_service.execution.device_time import DeviceSpan  # noqa: E402
from target_service.execution.host_executor import LaunchedWhole, Ready  # noqa: E402
from target_service.execution.prompt_scores import ScoredPrompt  # noqa: E402
from target_service.model.runner import ModelRunner  # noqa: E402
from target_service.sampling.verifier import SequenceVerifier, Verified  # noqa: E402
from target_service.speculation.policy.step_cost import StepCost  # noqa: E402
from tree_kernels.verification import Walk  # noqa: E402

PAGE_SIZE = 16
# Sizes of a step whose cost the row budget gets.
_ROWS = (1, 4, 16, 64, 256)
# Seconds by which a sleep may end too late; for the rest of a wait the thread yields.
_OVERSLEPT = 5e-5


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds: of a pass, of each row beyond one a sequence, and of the host for a launch."""

    one_pass: float
    row: float
    host: float

    def of_step(self, rows: int, sequences: int, passes: int) -> float:
        return passes * (self.one_pass + self.row * (rows - sequences))

    def cost(self) -> StepCost:
        return StepCost([(rows, self.of_step(rows, 1, 1)) for rows in _ROWS])


class _DeviceStep(LaunchedWhole):
    """A step under way; see `Launched`."""

    on_device = can_launch_before_results = True
    # Its clock is the host's.
    span: DeviceSpan | None = None

    def __init__(self, outcomes: list[Verified | None], ends_at: float) -> None:
        self._outcomes = outcomes
        self._ends_at = ends_at

    def wait(self) -> None:
        time.sleep(max(0.0, self._ends_at - time.perf_counter() - _OVERSLEPT))
        while time.perf_counter() < self._ends_at:
            time.sleep(0)

    def ended(self) -> bool:
        return time.perf_counter() >= self._ends_at

    def outcomes(self) -> list[Verified | None]:
        self.wait()
        return self._outcomes

    def prompt_logprobs(self) -> list[ScoredPrompt]:
        """See `Launched.prompt_logprobs`: no request here asks for any."""
        return []


class SimulatedSteps:
    """`Steps` on a simulated device, for sequences whose outputs are known."""

    in_background, tables = True, None

    def __init__(self, times: DeviceTimes) -> None:
        self._times = times
        self._expected: dict[int, list[int]] = {}
        self._free_at = 0.0

    def expect(self, sequence_id: int, output: Sequence[int]) -> None:
        """Set the output of a sequence that will run."""
        self._expected[sequence_id] = list(output)

    def use_pause(self) -> bool:
        """See `Steps.use_pause`."""
        return False

    def launch(self, batch: StepBatch, verifiers: Sequence[SequenceVerifier], passes: int, ready: Ready) -> _DeviceStep:
        """See `Steps.launch`. Verifies by the expected output, not by `verifiers`."""
        del verifiers
        ready()
        launched_at = time.perf_counter() + self._times.host
        while time.perf_counter() < launched_at:
            pass
        seconds = self._times.of_step(len(batch.input.token_ids), len(batch.items), passes)
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        outcomes = [
            None if item.tree is None else self._verify(item.sequence.sequence_id, item.tree, passes)
            for item in batch.items
        ]
        return _DeviceStep(outcomes, self._free_at)

    def _verify(self, sequence_id: int, tree: TokenTree, passes: int) -> Verified:
        expected = self._expected[sequence_id]
        rows = accepted_rows(tree, expected)
        token, *following = expected[len(rows) : len(rows) + passes]
        del expected[: len(rows) + passes]
        return Verified(Walk(rows, token), (), tuple(following))


def accepted_rows(tree: TokenTree, expected: Sequence[int]) -> tuple[int, ...]:
    """The path of rows below the root that agrees with the expected tokens."""
    rows: list[int] = []
    row = 0
    while True:
        hits = [child for child in tree.children[row] if tree.token_ids[child] == expected[len(rows)]]
        if not hits:
            return tuple(rows)
        row = hits[0]
        rows.append(row)


def empty_runner(vocabulary_size: int, tokens: int) -> ModelRunner:
    """A runner for the loop's bookkeeping alone: pages for `tokens`, lengths and the vocabulary."""
    config = LlamaConfig(
        vocab_size=vocabulary_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, eos_token_id=None,
    )  # fmt: skip
    return runner_for(
        LlamaForCausalLM(config), None, num_pages=tokens // PAGE_SIZE, page_size=PAGE_SIZE, max_context=1 << 14
    )


class SimulatedBench:
    """One engine, whose policies keep what they learned from load to load."""

    def __init__(self, times: DeviceTimes, draft: str, vocabulary_size: int, most: int, tokens: int) -> None:
        self._tokens, self._count = tokens, 0
        self._steps = SimulatedSteps(times)
        config = TargetConfig(model="none", draft=draft, max_running=most, speculative_disable_queue_size=most)
        runner = empty_runner(vocabulary_size, most * (1 << 12))
        self._loop = EngineLoop(runner, config, steps=self._steps, step_cost=times.cost())
        self.link = connect_draft(draft, self._loop.drafting, vocabulary_size, "")
        self._loop.drafting.attach(self.link)
        while not self._loop.drafting.connected:
            time.sleep(0.05)
            self._loop.drafting.listen()

    def decode(self, traces: Sequence[Trace], speculate: bool) -> tuple[float, int]:
        """Decode the outputs of all traces at once. Returns seconds and launches."""
        begin, left, launches = time.perf_counter(), len(traces), 0
        for trace in traces:
            self._count += 1
            # A trace that ended early continues with a token that no draft has.
            self._steps.expect(self._count, [*trace.output, *[0] * (2 * self._tokens)])
            sampling = SamplingParams(ignore_eos=True, max_tokens=self._tokens)
            request = SequenceRequest(tuple(trace.prompt), sampling, VerificationMode.GREEDY, 0, self._tokens)
            request = replace(request, speculate=speculate, tenant=f"{time.time_ns()}")
            self._loop.add(self._loop.make(self._count, request))
        while left:
            events = self._loop.step() or ()
            launches += 1
            left -= sum(not isinstance(event, StepVerdict) for event in events)
        return time.perf_counter() - begin, launches


def measure(
    bench: SimulatedBench, traces: Sequence[Trace], concurrency: int, repeats: int, tokens: int
) -> dict[str, Any]:
    seconds, launches, decoded = {False: 0.0, True: 0.0}, {False: 0, True: 0}, 0
    for repeat in range(-1, repeats):
        for begin in range(0, len(traces) - concurrency + 1, concurrency):
            for speculate in (False, True):
                took, steps = bench.decode(traces[begin : begin + concurrency], speculate)
                if repeat >= 0:
                    seconds[speculate] += took
                    launches[speculate] += steps
            decoded += concurrency * tokens * (repeat >= 0)
    return {
        "concurrency": concurrency,
        "plain_tokens_per_second": round(decoded / seconds[False], 1),
        "drafted_tokens_per_second": round(decoded / seconds[True], 1),
        "ratio": round(seconds[False] / seconds[True], 3),
        "tokens_per_launch": round(decoded / launches[True], 2),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--draft", required=True, help="address of a draft service")
    parser.add_argument("--pass-ms", type=float, default=1.2)
    parser.add_argument("--row-ms", type=float, default=0.013)
    parser.add_argument("--host-ms", type=float, default=0.2)
    parser.add_argument("--concurrency", default="1,8", type=comma_separated(int))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    switch_threads_often()
    traces = load(options.traces, "all")
    vocabulary_size = 1 + max(max(*trace.prompt, *trace.output) for trace in traces)
    times = DeviceTimes(options.pass_ms * 1e-3, options.row_ms * 1e-3, options.host_ms * 1e-3)
    bench = SimulatedBench(times, options.draft, vocabulary_size, max(options.concurrency), options.tokens)
    rows = []
    for concurrency in options.concurrency:
        rows.append(measure(bench, traces, concurrency, options.repeats, options.tokens))
        show(" ".join(f"{name} {value}" for name, value in rows[-1].items()))
    bench.link.stop()
    settings = settings_of(options)
    write_json(options.json, {"machine": describe(), "settings": settings, "results": rows})


if __name__ == "__main__":
    main()
