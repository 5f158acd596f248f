"""An engine's loop that outlives its requests, stepped by hand, so that later ones meet what earlier ones left."""

from __future__ import annotations

from typing import Any

from engine_harness import engine_config

from target_service.config import TargetConfig
from target_service.core.sequence import SequenceFinished, SequenceRequest, StepVerdict
from target_service.engine.loop import EngineLoop
from target_service.execution.host_executor import HostSteps, Steps
from target_service.model.runner import ModelRunner


class Engine:
    """A loop that outlives its requests, as a service's does."""

    def __init__(
        self, runner: ModelRunner, config: TargetConfig | None = None, steps: Steps | None = None, **options: Any
    ) -> None:
        """`options` as those of `EngineLoop`."""
        self.runner = runner
        self.loop = EngineLoop(runner, config or engine_config(), steps=steps or HostSteps(runner), **options)
        self._ids = iter(range(1, 100))

    def answer(self, *requests: SequenceRequest) -> tuple[list[tuple[int, ...]], list[int]]:
        """The output of each request, all run together, and how many tokens of each prompt were cached."""
        return self.finish([self.add(wanted) for wanted in requests])

    def add(self, wanted: SequenceRequest) -> int:
        sequence_id = next(self._ids)
        self.loop.add(self.loop.make(sequence_id, wanted))
        return sequence_id

    def finish(self, ids: list[int]) -> tuple[list[tuple[int, ...]], list[int]]:
        """The outputs of running requests, and how many tokens of each prompt were cached."""
        said: dict[int, list[int]] = {sequence_id: [] for sequence_id in ids}
        cached: dict[int, int] = {}
        while len(cached) < len(ids):
            for event in self.loop.step() or ():
                if isinstance(event, StepVerdict):
                    said[event.sequence_id] += event.token_ids
                elif isinstance(event, SequenceFinished):
                    cached[event.sequence_id] = event.totals.cached_tokens
            self.check()
        return [tuple(said[one]) for one in ids], [cached[one] for one in ids]

    def check(self) -> None:
        self.loop.scheduler.pages.check_integrity(live.sequence for live in self.loop.live.values())
