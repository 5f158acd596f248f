"""An engine under way, whose weights may be exchanged."""

from __future__ import annotations

import copy
import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_harness import Connect, engine_config, make_runner
from transformers import PreTrainedModel
from waits import HUNG_SECONDS

from outrider.errors import OutriderError
from outrider.weight_updates import RunningRequests, WeightsUpdated
from target_service.core.sequence import SequenceEvent, StepVerdict
from target_service.core.weights import WeightUpdate
from target_service.engine.engine import Engine
from target_service.model.runner import ModelRunner


class Running:
    """The engine, and what its sequences said."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        connect: Connect | None = None,
        runner: ModelRunner | None = None,
        **changes: Any,
    ) -> None:
        """`connect` brings a draft; `runner` is one of the model; `changes` are of the engine's configuration."""
        self.runner = runner or make_runner(copy.deepcopy(model))
        self.engine = Engine(self.runner, replace(engine_config(), **changes))
        if connect is not None:
            self.engine.drafting.attach(connect(self.engine.drafting))
        self.events: dict[int, list[SequenceEvent]] = {}
        self.changed = threading.Condition()
        self.results: queue.Queue[WeightsUpdated | OutriderError] = queue.Queue()
        self.engine.start(self._deliver)

    def _deliver(self, events: list[SequenceEvent]) -> None:
        with self.changed:
            for event in events:
                self.events.setdefault(event.sequence_id, []).append(event)
            self.changed.notify_all()

    def verdicts(self, sequence_id: int) -> list[StepVerdict]:
        return [event for event in self.events.get(sequence_id, []) if isinstance(event, StepVerdict)]

    def said(self, sequence_id: int) -> list[int]:
        return [token for verdict in self.verdicts(sequence_id) for token in verdict.token_ids]

    def wait_said(self, sequence_id: int, tokens: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.said(sequence_id)) >= tokens, HUNG_SECONDS)

    def wait_last(self, sequence_id: int) -> SequenceEvent:
        def ended() -> bool:
            events = self.events.get(sequence_id)
            return bool(events) and not isinstance(events[-1], StepVerdict)

        with self.changed:
            assert self.changed.wait_for(ended, HUNG_SECONDS)
        return self.events[sequence_id][-1]

    def update(self, folder: Path, running: RunningRequests = RunningRequests.DRAIN) -> int:
        return self.engine.update_weights(WeightUpdate(str(folder), running), self.results.put)

    def result(self) -> WeightsUpdated:
        result = self.results.get(timeout=HUNG_SECONDS)
        assert isinstance(result, WeightsUpdated), result
        return result

    def refused(self) -> OutriderError:
        result = self.results.get(timeout=HUNG_SECONDS)
        assert isinstance(result, OutriderError), result
        return result
