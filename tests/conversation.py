"""Talking to a target's Verify in tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waits import HUNG_SECONDS

from outrider.errors import OutriderError
from outrider.v1 import target_pb2 as pb
from outrider.v1 import tree_pb2
from outrider.wire.trees import error_of


class Conversation:
    """One Verify stream, frame by frame."""

    def __init__(self, target: Any, **options: Any) -> None:
        self.call = target.stub.Verify(**options)

    async def send(self, frame: pb.VerifyRequest) -> None:
        await self.call.write(frame)

    async def hear(self) -> pb.VerifyResponse:
        response = await asyncio.wait_for(self.call.read(), HUNG_SECONDS)
        assert isinstance(response, pb.VerifyResponse)
        return response

    async def open(self, *token_ids: int, **fields: Any) -> pb.VerificationOpened:
        await self.send(pb.VerifyRequest(open=pb.OpenVerification(token_ids=token_ids or (10,), **fields)))
        return (await self.hear()).opened

    async def ask(self, frame: pb.VerifyRequest) -> pb.VerifyResponse:
        await self.send(frame)
        return await self.hear()

    async def fail(self, frame: pb.VerifyRequest) -> OutriderError:
        """The error that answers a frame."""
        answer = await self.ask(frame)
        assert answer.WhichOneof("frame") == "status"
        return error_of(answer.status.status)

    async def silent(self) -> None:
        """Nothing more is said."""
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(self.call.read(), 0.05)


def tree(sequence_id: int, step: int, *token_ids: int, parents: tuple[int, ...] = ()) -> pb.VerifyRequest:
    """A tree frame; a chain unless parents are given."""
    chain = (0, *range(len(token_ids) - 1))
    rows = tree_pb2.TokenTree(token_ids=token_ids, parents=parents or chain)
    return pb.VerifyRequest(tree=pb.VerifyTree(sequence_id=sequence_id, step=step, tree=rows))


def close(sequence_id: int) -> pb.VerifyRequest:
    return pb.VerifyRequest(close=pb.CloseVerification(sequence_id=sequence_id))
