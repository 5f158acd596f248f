"""Calls of OpenEngine's services in tests, by generated messages alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from waits import HUNG_SECONDS

from outrider.errors import OutriderError
from outrider.openengine import openengine_pb2 as pb
from outrider.wire.trees import error_of_rpc


def calling(channel: grpc.aio.Channel, method: str, request: Any, **options: Any) -> Any:
    """A call, by the method's short name; of bytes as they are."""
    service = next(one for one in pb.DESCRIPTOR.services_by_name.values() if method in one.methods_by_name)
    found = service.methods_by_name[method]
    make = channel.unary_stream if found.server_streaming else channel.unary_unary
    multi: Any = make(
        f"/{service.full_name}/{method}",
        request_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
        response_deserializer=GetMessageClass(found.output_type).FromString,
    )
    return multi(request, timeout=HUNG_SECONDS, **options)


def generate_request(*token_ids: int, **fields: Any) -> pb.GenerateRequest:
    """A request for `token_ids`, or for what `fields` have; nested messages may be given as dictionaries."""
    if "prompt" not in fields:
        fields["token_ids"] = {"ids": token_ids or (10, 20)}
    return pb.GenerateRequest(**({"request_id": "one"} | fields))


@dataclass
class Outputs:
    """The responses to a request, held to the order that OpenEngine has, and what they say of each output."""

    responses: list[pb.GenerateResponse]

    def __post_init__(self) -> None:
        self.texts: dict[int, str] = defaultdict(str)
        self.infos: dict[int, list[pb.TokenInfo]] = defaultdict(list)
        self.ends: dict[int, pb.GenerationFinished] = {}
        self.prompt: list[pb.TokenInfo] = []
        self.usage, self.error = self.responses[-1].usage, self.responses[-1].error
        assert self.responses[-1].WhichOneof("event") in ("finished", "error") and self.responses[-1].HasField("usage")
        for place, response in enumerate(self.responses):
            last = place == len(self.responses) - 1
            assert response.HasField("usage") == last
            kind = response.WhichOneof("event")
            if kind == "prompt":
                assert not self.prompt and not self.infos
                self.prompt = list(response.prompt.tokens)
            elif kind == "token":
                index = response.token.output_index
                assert response.token.HasField("output_index") and index not in self.ends
                self.infos[index] += response.token.tokens
                self.texts[index] += response.token.text
            elif kind == "finished":
                index = response.finished.output_index
                assert response.finished.HasField("output_index") and index not in self.ends
                self.ends[index] = response.finished
            else:
                assert kind == "error" and last

    def tokens(self, index: int = 0) -> list[int]:
        return [info.token_id for info in self.infos[index]]


async def outputs_of(channel: grpc.aio.Channel, request: Any, **options: Any) -> Outputs:
    return Outputs([response async for response in calling(channel, "Generate", request, **options)])


async def refusal(
    channel: grpc.aio.Channel, method: str, request: Any, **options: Any
) -> tuple[grpc.StatusCode, OutriderError]:
    """How a call ends that nothing is said to."""
    call = calling(channel, method, request, **options)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for response in call:
                raise AssertionError(response)
        else:
            await call
    return caught.value.code(), error_of_rpc(caught.value)
