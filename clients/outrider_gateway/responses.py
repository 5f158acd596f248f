"""The endpoint /v1/responses, and the responses that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider_client.answers import ToolCall
from outrider_client.messages import ChatTurn
from outrider_gateway.admission import GatewayAdmission
from outrider_gateway.caller import caller_from
from outrider_gateway.endpoint import HttpCall
from outrider_gateway.endpoints import GenerationEndpoint
from outrider_gateway.failures import Refused
from outrider_gateway.responses_json import Json, ResponsesBuilder
from outrider_gateway.responses_request import ResponsesRequest
from outrider_gateway.shared_state import ResponseStore
from outrider_gateway.stored_responses import StoredResponse


@dataclass
class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest, ResponsesBuilder]):
    """Answers requests, and keeps what they may go on with."""

    _stored: ResponseStore

    async def _prepared(self, call: HttpCall, request: ResponsesRequest) -> ResponsesRequest:
        if not request.previous:
            return request
        found = await self._stored.get(call.holder.tenant, request.previous)
        if found is None:
            raise Refused(
                404,
                "previous_response_id: no such response is kept; send its items as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return request.continuing(found.turns)

    async def _answered(self, call: HttpCall, request: ResponsesRequest, builder: ResponsesBuilder) -> None:
        response = builder.complete
        if request.store and response is not None:
            turns = (*request.turns, *_assistant_turns(response["output"]))
            stored = StoredResponse(orjson.dumps(response), turns)
            await self._stored.put(call.holder.tenant, builder.response_id, stored)


def _assistant_turns(items: Sequence[Json]) -> tuple[ChatTurn, ...]:
    """The assistant's turn that a response's items are."""
    texts = {"message": "", "reasoning": ""}
    calls: list[ToolCall] = []
    for item in items:
        if item["type"] == "function_call":
            calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        else:
            texts[item["type"]] += item["content"][0]["text"]
    return (ChatTurn("assistant", texts["message"], tuple(calls), reasoning=texts["reasoning"]),)


@dataclass(frozen=True, slots=True)
class StoredResponseRoutes:
    """GET and DELETE of the responses that are kept."""

    admission: GatewayAdmission
    stored: ResponseStore

    def route(self) -> Route:
        return Route("/v1/responses/{response_id}", self._serve, methods=["GET", "DELETE"])

    async def _serve(self, request: HttpRequest) -> Response:
        response_id = request.path_params["response_id"]
        caller = caller_from(request.scope["headers"])
        async with self.admission.admitted(caller, request.scope) as holder:
            found = await self.stored.get(holder.tenant, response_id)
            if found is None:
                raise Refused(404, "no such response is kept", param="response_id", code="response_not_found")
            if request.query_params.get("stream") in ("true", "1"):
                raise Refused(400, "stream: a response that is kept is whole", param="stream")
            if request.method == "DELETE":
                await self.stored.delete(holder.tenant, response_id)
                return JSONResponse({"id": response_id, "object": "response", "deleted": True})
            return Response(found.body, media_type="application/json")
