"""Asking a target for a generation in tests, and reading what it says."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from outrider.errors import OutriderError
from outrider.v1 import target_pb2 as pb
from outrider.wire.trees import error_of_rpc


def asking(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    """A request for `token_ids`; nested messages may be given as dictionaries."""
    return pb.GenerateRequest(tokens=pb.TokenInput(token_ids=token_ids or (10, 20)), **fields)


async def answers(target: Any, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateResponse]:
    return [response async for response in target.stub.Generate(request, **options)]


async def refused(target: Any, request: pb.GenerateRequest, **options: Any) -> tuple[grpc.StatusCode, OutriderError]:
    """How a request fails, after checking that it left nothing behind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers(target, request, **options)
    assert len(target.sequences) == 0
    return caught.value.code(), error_of_rpc(caught.value)


def tokens_of(responses: list[pb.GenerateResponse]) -> list[int]:
    return [token for response in responses for token in response.chunk.token_ids]
