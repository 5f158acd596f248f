"""The engine in this process, without gRPC, under the same loads as services."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from benchmarks.random_models.checkpoint import random_weights
from benchmarks.serving.figures import Share, TimedAnswer
from benchmarks.shared.engine_events import EngineEvents
from benchmarks.shared.step_recorder import StepRecorder
from benchmarks.shared.workload import Prompt
from outrider.sampling import SamplingParams, VerificationMode
from target_service.assembly import load_model
from target_service.config import TargetConfig
from target_service.core.sequence import SequenceRequest, StepVerdict
from target_service.engine.engine import Engine
from target_service.model.cuda_graphs.sizes import Bucket, buckets_up_to
from tree_models.fused.preparing import MANY_ROWS


def sizes_of_loads(buckets: Sequence[Bucket], loads: Sequence[int], *, trees: bool = False) -> tuple[Bucket, ...]:
    """Of the sizes that may be captured those in which so many sequences decode, and of larger ones those that read
    prompts for the most sequences, or with `trees` all for as many as the smallest load has; none of whose layers
    PyTorch compiles."""
    if trees:
        return tuple(one for one in buckets if one.rows <= MANY_ROWS and one.sequences >= min(loads) and not one.common)
    most = max(loads)
    fitting = ([one for one in buckets if one.rows >= load <= one.sequences and not one.common] for load in loads)
    decoding = {min(sizes) for sizes in fitting}
    reading = {one for one in buckets if most < one.rows <= MANY_ROWS and one.sequences >= most and not one.common}
    return tuple(sorted(decoding | reading))


@contextmanager
def capturing_for(loads: Sequence[int], *, trees: bool = False) -> Iterator[None]:
    """Targets that are loaded meanwhile capture the sizes of these loads alone, see `sizes_of_loads`, in a fraction of
    the time. Larger steps run eagerly, so that prompts may take longer, and decoding runs in the sizes in which it
    always does."""
    # Only here: Triton may be absent.
    from target_service.model.cuda_graphs import runner

    def few(max_rows: int, max_sequences: int, *, common: bool = False) -> tuple[Bucket, ...]:
        return sizes_of_loads(buckets_up_to(max_rows, max_sequences, common=common), loads, trees=trees)

    with patch.object(runner, "buckets_up_to", few):
        yield


class EngineLoads:
    """Loads on an engine. `steps` records its steps, `last_tokens` has the last token of each answer of the latest
    wave."""

    def __init__(self, make: Callable[[StepRecorder], Engine]) -> None:
        """`make` makes the engine, given the observer of its steps."""
        self.steps = StepRecorder()
        self.last_tokens: list[int] = []
        self._latest: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, TimedAnswer] = {}
        self._events = EngineEvents(self._record)
        self._engine = make(self.steps)
        self._engine.start(self._events.deliver)

    def _record(self, verdict: StepVerdict) -> None:
        answer = self._answers[verdict.sequence_id]
        answer.times.append(time.monotonic())
        answer.counts.append(len(verdict.token_ids))
        if verdict.token_ids:
            self._latest[verdict.sequence_id] = verdict.token_ids[-1]

    def wave(self, prompts: Sequence[Prompt], max_tokens: int, **_how: object) -> tuple[float, list[TimedAnswer]]:
        """Submit all at once. Returns seconds until the last answer has ended, and the answers."""
        begin = time.perf_counter()
        begun = [self._begin(ids, max_tokens) for ids in prompts]
        for _ in prompts:
            self._events.wait()
        seconds = time.perf_counter() - begin
        self.last_tokens = [self._latest[number] for number in begun]
        self._latest.clear()
        return seconds, [self._answers.pop(number) for number in begun]

    def closed(self, requests: Sequence[tuple[Prompt, int]], concurrency: int, **_how: object) -> list[Share]:
        """Keep `concurrency` requests in flight: when an answer ends, the next request begins."""
        waiting = iter(requests)
        begun = [self._begin(*next(waiting)) for _ in range(concurrency)]
        for _ in requests:
            self._events.wait()
            following = next(waiting, None)
            if following is not None:
                begun.append(self._begin(*following))
        return [Share(concurrency, [self._answers.pop(number) for number in begun])]

    def close(self) -> None:
        self._engine.stop()

    def _begin(self, ids: Prompt, max_tokens: int) -> int:
        sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        request = SequenceRequest(ids, sampling, VerificationMode.GREEDY, 0, max_tokens)
        number = next(self._numbers)
        self._answers[number] = TimedAnswer(time.monotonic(), [], [])
        return self._engine.submit(request, number)


class EngineAlone(EngineLoads):
    """A model's engine without drafts."""

    def __init__(self, config: TargetConfig, *, random: bool = False, loads: Sequence[int] = ()) -> None:
        """With `random`, the model's folder has no weights, and gets random ones; with `loads` only sizes of steps are
        captured that these numbers of sequences need."""

        def make(steps: StepRecorder) -> Engine:
            with random_weights() if random else nullcontext(), capturing_for(loads) if loads else nullcontext():
                runner = load_model(config)
            return Engine(runner, config, observer=steps)

        super().__init__(make)
