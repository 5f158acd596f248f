"""What Verify refuses frame by frame, while its stream and its sequences go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conversation import Conversation, close, tree
from scripted_engine import SERVED, VOCABULARY

from outrider.errors import (
    Draining,
    EngineDead,
    InvalidField,
    NotSupported,
    OutriderError,
    PositionOutOfRange,
    QuotaExceeded,
    StepSkipped,
    UnknownSequence,
    WrongRoot,
)
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import error_of
from target_service.config import TargetConfig


@pytest.mark.parametrize("allowed", [False, True])
async def test_typical_acceptance_needs_the_operator(targets: Any, allowed: bool) -> None:
    frame = pb.OpenVerification(token_ids=[10], mode=tree_pb2.VERIFICATION_MODE_TYPICAL, sampling={"temperature": 1})
    async with targets(served=replace(SERVED, lossy=allowed)) as target:
        answer = await Conversation(target).ask(pb.VerifyRequest(open=frame))
    if allowed:
        assert answer.opened.mode == tree_pb2.VERIFICATION_MODE_TYPICAL
    else:
        assert isinstance(error_of(answer.status.status), NotSupported)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "kind", "field"),
        [
            (lambda i: tree(i, 1, 10), StepSkipped, None),
            (lambda i: tree(i, 2**64 - 1, 10), StepSkipped, None),
            (lambda i: tree(i, 0, 11), WrongRoot, None),
            (lambda i: tree(i + 1, 0, 10), UnknownSequence, None),
            (lambda _: tree(0, 0, 10), UnknownSequence, None),
            (lambda i: tree(i, 0), InvalidField, "tree.token_ids"),
            (lambda i: tree(i, 0, *range(10, 27)), InvalidField, "tree.token_ids"),
            (lambda i: tree(i, 0, 10, VOCABULARY), InvalidField, "tree.token_ids[1]"),
            (lambda i: tree(i, 0, 10, 2**32 - 1), InvalidField, "tree.token_ids[1]"),
            (lambda i: tree(i, 0, 10, 11, parents=(0, 1)), InvalidField, "tree.parents[1]"),
            (lambda i: tree(i, 0, 10, 11, parents=(0,)), InvalidField, "tree.parents"),
            (lambda i: tree(i, 0, 10, 11, 11, parents=(0, 0, 0)), InvalidField, "tree.token_ids[2]"),
            (lambda _: pb.VerifyRequest(), InvalidField, "frame"),
        ],
        ids=[
            "next-step",
            "far-step",
            "wrong-root",
            "unknown",
            "zero",
            "empty",
            "too-many-rows",
            "token-outside",
            "token-at-the-top",
            "own-parent",
            "few-parents",
            "twin-children",
            "no-frame",
        ],
    )
    async def test_bad_frame_harms_only_itself(
        self, talk: Conversation, make: Any, kind: type[OutriderError], field: str | None
    ) -> None:
        opened = await talk.open()
        answer = await talk.ask(make(opened.sequence_id))
        error = error_of(answer.status.status)
        assert type(error) is kind
        assert field is None or getattr(error, "field", None) == field
        assert (answer.status.sequence_id, answer.status.step) == (
            make(opened.sequence_id).tree.sequence_id,
            make(opened.sequence_id).tree.step,
        )
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"token_ids": []}, "open.token_ids"),
            ({"token_ids": [1, VOCABULARY]}, "open.token_ids[1]"),
            ({"token_ids": [1], "sampling": {"temperature": float("nan")}}, "open.sampling.temperature"),
            ({"token_ids": [1], "mode": 2}, "open.mode"),
            ({"token_ids": [1], "mode": 9}, "open.mode"),
        ],
        ids=["empty", "token-outside", "nan", "mode-at-zero", "unknown-mode"],
    )
    async def test_bad_open(self, talk: Conversation, target: Any, fields: Any, field: str) -> None:
        answer = await talk.ask(pb.VerifyRequest(open=pb.OpenVerification(client_tag=5, **fields)))
        error = error_of(answer.status.status)
        assert isinstance(error, InvalidField)
        assert error.field == field
        assert (answer.status.client_tag, answer.status.sequence_id) == (5, 0)
        assert not target.engine.requests

    async def test_prompt_and_tree_past_the_context(self, talk: Conversation) -> None:
        long = pb.OpenVerification(token_ids=[10] * SERVED.max_context)
        assert isinstance(await talk.fail(pb.VerifyRequest(open=long)), PositionOutOfRange)
        opened = await talk.open(*[10] * (SERVED.max_context - 2))
        deep = tree(opened.sequence_id, 0, 10, 11, 12, 13)
        assert isinstance(await talk.fail(deep), PositionOutOfRange)
        verdict = (await talk.ask(tree(opened.sequence_id, 0, 10, 11, 12))).verdict
        assert (list(verdict.token_ids), verdict.finish_reason) == ([11, 12], pb.FINISH_REASON_LENGTH)

    async def test_sequence_of_another_stream(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        other = Conversation(target)
        assert isinstance(await other.fail(tree(opened.sequence_id, 0, 10)), UnknownSequence)
        await other.send(close(opened.sequence_id))
        other.call.cancel()
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]

    async def test_too_many_sequences(self, targets: Any) -> None:
        async with targets(config=TargetConfig(max_sequences_per_stream=2)) as target:
            talk = Conversation(target)
            first = await talk.open()
            await talk.open()
            assert isinstance(await talk.fail(pb.VerifyRequest(open=pb.OpenVerification(token_ids=[1]))), QuotaExceeded)
            await talk.send(close(first.sequence_id))
            assert (await talk.open()).sequence_id == 3
            talk.call.cancel()

    async def test_ended_sequences_make_room(self, targets: Any) -> None:
        async with targets(config=TargetConfig(max_sequences_per_stream=1)) as target:
            talk = Conversation(target)
            for _ in range(3):
                opened = await talk.open(sampling={"max_tokens": 1})
                assert (await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.finish_reason
            talk.call.cancel()

    async def test_draining_and_dead(self, talk: Conversation, target: Any) -> None:
        opened = await talk.open()
        target.engine.drain()
        assert isinstance(await talk.fail(pb.VerifyRequest(open=pb.OpenVerification(token_ids=[1]))), Draining)
        assert list((await talk.ask(tree(opened.sequence_id, 0, 10))).verdict.token_ids) == [11]
        target.engine.die(RuntimeError("kernel"))
        failed = (await talk.hear()).status
        assert (failed.sequence_id, failed.step) == (opened.sequence_id, 1)
        assert isinstance(error_of(failed.status), EngineDead)
        assert isinstance(await talk.fail(tree(opened.sequence_id, 1, 11)), UnknownSequence)
