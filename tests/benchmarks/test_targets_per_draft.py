"""Simulated targets understand all that a real draft says."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drafters.random_trees import RandomConfig, RandomDrafter
from benchmarks.fleet.targets_per_draft import VOCABULARY_SIZE, CommitOutcomes, SimulatedTarget
from draft_service.faults import FaultLog
from draft_service.server import _ProposeStream
from draft_service.session import ProposeSession, SequenceAdmission
from draft_service.telemetry.metrics import DraftMetrics
from draft_service.telemetry.tracing import StreamTrace
from outrider.drafting.events import SequenceFailure
from outrider.telemetry.tracing import Tracing


def test_every_commit_is_answered() -> None:
    stream = _ProposeStream(
        ProposeSession(RandomDrafter(RandomConfig()), SequenceAdmission(2), "default"),
        DraftMetrics("random", "0", dict),
        StreamTrace(Tracing(), (), "random"),
        FaultLog("random"),
    )
    answers = CommitOutcomes()
    target = SimulatedTarget(0, 2, np.arange(20_000) % VOCABULARY_SIZE, answers)
    target.measures = True

    def exchange() -> None:
        while target._conversation.outgoing:
            for response in stream.handle_and_grow([target._conversation.outgoing.popleft()]):
                target._conversation.receive(response)
        while responses := stream.grow():
            for response in responses:
                target._conversation.receive(response)

    for each in target._ids:
        target._open(each)
    exchange()
    for now in range(3):
        target._step(float(now))
        exchange()
    assert answers.expected == len(answers.milliseconds) == 6
    with pytest.raises(SystemExit, match="the draft refused"):
        target.receive(SequenceFailure(0, "INTERNAL", "a bug"))
