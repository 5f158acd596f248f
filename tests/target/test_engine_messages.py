"""What goes through the frames between the target's two processes comes out equal, however the bytes are cut."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField, QuotaExceeded, all_errors
from outrider.limits import TenantLimits
from outrider.processes.framing import LENGTH_BYTES, FrameCutter
from outrider.sampling import FinishReason, SamplingParams, TokenLogprobs, TypicalAcceptance, VerificationMode
from outrider.tree import DraftDistribution, TokenTree, VerifiedTree
from outrider.weight_updates import RunningRequests, WeightsUpdated
from outrider.wire.frames import DraftInfo, FeatureRequest, TreeLimits
from target_service.api.admission import ServedModel
from target_service.config import TargetConfig
from target_service.core.events import EngineSnapshot
from target_service.core.sequence import (
    Finish,
    SequenceEvent,
    SequenceFailed,
    SequenceFinished,
    SequenceRequest,
    SequenceTotals,
    StepStats,
    StepVerdict,
)
from target_service.core.weights import WeightUpdate
from target_service.engine_process.messages import (
    Cancel,
    CancelUpdate,
    Configure,
    Dead,
    DrafterChanged,
    Message,
    ModelFound,
    ModelLoaded,
    Ready,
    Report,
    StartRefused,
    Stop,
    Submit,
    UpdateWeights,
    Verify,
    WeightsDone,
    pack,
    unpack,
)
from tree_kernels.prefix_tree import PageChange

SNAPSHOT = EngineSnapshot(3, 2, 5, 100, 200, speculating=True, draft_connected=False, draft_lost="gone")
TOTALS = SequenceTotals(
    arrived_ns=2**60,
    prompt_tokens=3,
    drafted_by_depth=[4, 3],
    accepted_by_depth=[2],
    fallback_steps=1,
    preemptions=2,
    draft_refused="UNKNOWN_CORPUS",
)
STATS = StepStats(**{name: place for place, name in enumerate(StepStats.__slots__)})


def report(*events: SequenceEvent) -> Report:
    return Report(list(events), [], [], [], [], SNAPSHOT, 123)


SERVED = replace(
    ServedModel("m", 300, 256, 16, "float32", 16, 4096, (2, 3), "f" * 64, speculation=True),
    kv_token_bytes=46_080,
    torch_version="2.9",
    device="cuda:1",
    device_name="A GPU",
    captured_step_sizes=25,
    capturable_step_sizes=26,
    lookup=True,
)
MESSAGES: dict[str, Message] = {
    "configure": Configure(TargetConfig(model="tiny", draft_wait_ms=2.5, reflection=True)),
    "submit": Submit(
        2**40,
        SequenceRequest(
            token_ids=(1, 2, 3),
            sampling=SamplingParams(
                temperature=0.7,
                logit_bias={5: -2.5, 7: 100.0},
                stop=("\U0001f600 end", "\n\n"),
                stop_token_ids=(9, 10),
                seed=2**64 - 1,
                logprobs=0,
            ),
            mode=VerificationMode.REJECTION,
            seed=2**64 - 1,
            max_tokens=77,
            tenant="acmé",
            limits=TenantLimits(2.5, 3, kv_tokens=4096),
            speculate=False,
            corpus="c",
            prediction=(4, 5, 6),
            external=True,
            traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        ),
    ),
    "submit_plain": Submit(1, SequenceRequest((1,), SamplingParams(), VerificationMode.GREEDY, 0, 1)),
    "submit_typical": Submit(
        1,
        SequenceRequest((1,), SamplingParams(), VerificationMode.TYPICAL, 0, 1, TypicalAcceptance(0.2, 0.4)),
    ),
    "verify": Verify(4, TokenTree((1, 2, 3), (0, 0, 1), (1.0, 0.1, 1 / 3), {0: DraftDistribution((2, 8), (65535, 1))})),
    "cancel": Cancel(2**53 + 1),
    "stop": Stop(),
    "found": ModelFound(),
    "loaded": ModelLoaded(49152, (2, 7)),
    "ready": Ready(SERVED),
    "refused": StartRefused(2, "error: --draft: \u201cno\u201d"),
    "drafter": DrafterChanged(DraftInfo("trie", 0, "f", TreeLimits(63, 8), 4096, "0.1")),
    "feature_drafter": DrafterChanged(
        DraftInfo(
            "eagle", 300, "", TreeLimits(63, 8), 4096, "0.1", FeatureRequest((1, 5), 64, "float32", True, False, 9)
        )
    ),
    "no_drafter": DrafterChanged(None),
    "update": UpdateWeights(3, WeightUpdate("/weights/step-1", RunningRequests.CONTINUE)),
    "cancel_update": CancelUpdate(3),
    "updated": WeightsDone(3, WeightsUpdated(2, 290, 2**34, 5e-9, 6e-9, aborted=7, continued=8), None),
    "dead": Dead("the engine has failed"),
    "idle": report(),
    "plain": report(*(StepVerdict(i, i + 1, (), (i + 7,), 0, compute_ns=10**6) for i in range(64))),
    "several steps": report(
        StepVerdict(1, 2, (), (11, 12, 13, 14), 2, drafts_by_step=(0, 2)), StepVerdict(2, 2, (), (5,), 0)
    ),
    "accepted": report(StepVerdict(1, 0, (1, 4, 5), (11, 12, 13, 14), 3, queue_ns=5, compute_ns=6)),
    "tree": report(StepVerdict(1, 0, (1,), (11, 12), 1, tree=VerifiedTree((10, 11, 13), (0, 0, 0), (1,)))),
    "logprobs": report(
        StepVerdict(
            *(1, 0, (), (11, 12), 0),
            logprobs=(TokenLogprobs(-0.1, ((11, -0.1), (3, -1e-30))), TokenLogprobs(-math.inf)),
            compute_ns=6,
        )
    ),
    "finished": report(
        StepVerdict(1, 0, (), (2,), 0, finish=Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=2)),
        SequenceFinished(1, Finish(FinishReason.END_OF_SEQUENCE, stop_token_id=2), TOTALS),
    ),
    "stopped": report(
        StepVerdict(1, 0, (), (2,), 0, (TokenLogprobs(-0.5),), Finish(FinishReason.STOP, stop_string="\u2028")),
        SequenceFinished(1, Finish(FinishReason.STOP, stop_string="\u2028"), TOTALS),
    ),
    "figures": Report([], [STATS, STATS], [(4, TOTALS, "cancelled")], [True, False], [], SNAPSHOT, 2**62),
    "pages": Report(
        [], [], [], [], [PageChange(2**64 - 1, True, 7, "acme", b"\1\0\0\0"), PageChange(7), PageChange(0)], SNAPSHOT, 1
    ),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_round_trip(message: Message) -> None:
    received = unpack(pack(message)[LENGTH_BYTES:])
    assert received == message
    assert type(received) is type(message)


def test_values_are_as_immutable_as_they_were() -> None:
    """Equality does not tell a list in a tuple's place inside the values that are compared by field."""
    for name in ("accepted", "logprobs"):
        received = unpack(pack(MESSAGES[name])[LENGTH_BYTES:])
        assert isinstance(received, Report)
        hash(received.events[0])


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_reason_and_facts(kind: Any) -> None:
    error = InvalidField("tree.parents[3]", "a: b") if kind is InvalidField else kind("no: room", limit=3, name="x")
    sent = unpack(pack(report(SequenceFailed(7, error, "UNKNOWN_CORPUS")))[LENGTH_BYTES:])
    assert isinstance(sent, Report)
    (event,) = sent.events
    assert isinstance(event, SequenceFailed)
    received = event.error
    assert (event.sequence_id, event.draft_refused) == (7, "UNKNOWN_CORPUS")
    assert type(received) is kind
    assert (received.message, received.metadata, str(received)) == (error.message, error.metadata, str(error))
    if isinstance(error, InvalidField):
        assert isinstance(received, InvalidField)
        assert (received.field, received.problem) == (error.field, error.problem)


@pytest.mark.parametrize("seconds", [2.5, 30, None], ids=str)
def test_an_error_keeps_its_time_to_retry(seconds: float | None) -> None:
    sent = unpack(pack(report(SequenceFailed(7, QuotaExceeded("full").after(seconds))))[LENGTH_BYTES:])
    assert isinstance(sent, Report)
    (event,) = sent.events
    assert isinstance(event, SequenceFailed)
    assert event.error.retry_after == seconds


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20], ids=str)
def test_frames_are_found_however_bytes_arrive(size: int) -> None:
    stream = b"".join(pack(message) for message in MESSAGES.values())
    frames, received = FrameCutter(), []
    for begin in range(0, len(stream), size):
        received += map(unpack, frames.feed(stream[begin : begin + size]))
    assert received == list(MESSAGES.values())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff" * 9,
        msgspec.msgpack.encode(["Nothing", 1]),
        msgspec.msgpack.encode(["Cancel"]),
        msgspec.msgpack.encode(["Cancel", "1"]),
        msgspec.msgpack.encode(["Report", [["StepVerdict", 1]], [], [], [], {}, 0]),
        msgspec.msgpack.encode(["Report", [["SequenceFailed", 1, ["DRAINING"]]], [], [], [], {}, 0]),
        pack(MESSAGES["plain"])[LENGTH_BYTES:-1],
    ],
    ids=["empty", "text", "noise", "unknown", "short", "type", "verdict", "error", "cut"],
)
def test_malformed_frames_are_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack(body)
