"""The HTTP application: routes, health, models, and errors in OpenAI's form."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import outrider
from outrider_gateway.admission import GatewayAdmission
from outrider_gateway.caller import caller_from
from outrider_gateway.config import GatewayConfig
from outrider_gateway.endpoints import GenerationEndpoint
from outrider_gateway.failures import Refused
from outrider_gateway.hosts import host_check
from outrider_gateway.messages_json import MessageBuilder, error_body
from outrider_gateway.messages_request import count_call, messages_request
from outrider_gateway.metrics import GatewayMetrics
from outrider_gateway.page import page_routes
from outrider_gateway.response_json import ResponseBuilder
from outrider_gateway.responses import ResponsesEndpoint, StoredResponseRoutes
from outrider_gateway.responses_json import ResponsesBuilder
from outrider_gateway.responses_request import responses_request
from outrider_gateway.served_models import ServedModels
from outrider_gateway.shared_state import SharedState
from outrider_gateway.target_calls import CallEndpoint, detokenize_call, tokenize_call
from outrider_gateway.targets import Targets
from outrider_gateway.translation import chat_request, completion_request

# Of OpenAI's paths, and of others that clients try.
_NOT_SERVED = {
    "/v1/embeddings": "there are no embeddings: the model generates text",
    "/v1/images": "there are no images: the model generates text",
    "/v1/audio": "there is no audio: the model reads and generates text",
    "/v1/moderations": "there are no moderations: the model generates text",
    "/v1/assistants": "there are no assistants: /v1/responses and /v1/chat/completions answer",
    "/v1/threads": "there are no threads: /v1/responses and /v1/chat/completions answer",
    "/v1/batches": "there are no batches: requests are answered as they come",
    "/v1/files": "there are no files: prompts are text",
}


class Application:
    """What the routes share. `draining` is set when the gateway is about to stop."""

    def __init__(self, config: GatewayConfig, targets: Targets, models: ServedModels, state: SharedState) -> None:
        self.draining = False
        self.targets = targets
        self._served = models
        self._state = state
        self.metrics = metrics = GatewayMetrics()
        metrics.gauges(targets.readings)
        self._admission = admission = GatewayAdmission(state, targets)
        shared, kept = (config, admission, targets, models, metrics), state.responses
        generating: dict[str, ASGIApp] = {
            "/v1/chat/completions": GenerationEndpoint("chat", *shared, chat_request, ResponseBuilder),
            "/v1/completions": GenerationEndpoint("completions", *shared, completion_request, ResponseBuilder),
            "/v1/responses": ResponsesEndpoint("responses", *shared, responses_request, ResponsesBuilder, kept),
        }
        generating["/v1/messages"] = GenerationEndpoint(
            "messages", *shared, messages_request, MessageBuilder, error_body=error_body
        )
        calls: dict[str, ASGIApp] = {
            "/v1/messages/count_tokens": CallEndpoint("count_tokens", *shared, count_call, error_body=error_body),
            "/tokenize": CallEndpoint("tokenize", *shared, tokenize_call),
            "/detokenize": CallEndpoint("detokenize", *shared, detokenize_call),
        }
        routes: list[BaseRoute] = [
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in {**generating, **calls}.items()),
            StoredResponseRoutes(admission, kept).route(),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/health", self._alive),
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics_page),
        ]
        if config.page:
            routes += page_routes()
        others = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Refused: _refused})
        self.paths = tuple(route.path for route in routes if isinstance(route, Route))
        self.asgi = host_check(_cross_origin(_shortcut(generating, others), config.origins), config)

    async def _models(self, request: Request) -> Response:
        caller = caller_from(request.scope["headers"])
        async with self._admission.asking(caller, request.scope):
            return JSONResponse({"object": "list", "data": await self._served.models(caller)})

    async def _model(self, request: Request) -> Response:
        caller = caller_from(request.scope["headers"])
        async with self._admission.asking(caller, request.scope):
            return JSONResponse(await self._served.model(request.path_params["model"], caller))

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": outrider.__version__})

    async def _alive(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, _request: Request) -> Response:
        targets = {target.address: target.healthy for target in self.targets.all}
        ready = any(targets.values()) and not self.draining
        status = "ok" if ready else "draining" if self.draining else "no healthy target"
        return JSONResponse({"status": status, "targets": targets}, 200 if ready else 503)

    async def _metrics_page(self, _request: Request) -> Response:
        page = await self._state.metrics_page(self.metrics)
        return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


def _shortcut(endpoints: Mapping[str, ASGIApp], others: ASGIApp) -> ASGIApp:
    """Requests for answers go straight to their endpoint, which handles its own errors; all else to `others`. What
    stands around a Starlette application's routes takes a tenth of a request's time before the target is asked."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if len(path := scope["path"]) > 1 and path.endswith("/"):
            # The same place. A redirect would send the body twice, which some clients do not.
            scope = {**scope, "path": (path := path[:-1])}
        endpoint = endpoints.get(path) if scope["method"] == "POST" else None
        await (endpoint or others)(scope, receive, send)

    return application


def _cross_origin(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app` for pages of these origins too (CORS): preflights are answered, and answers marked. `app` itself for none.
    No cookies: a caller is known by its bearer token alone, which a page has to have. Any header may be sent, since
    clients add their own (`x-stainless-*`), and none but those of `caller` are looked at."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        # What a caller needs of an answer besides its body.
        expose_headers=("x-request-id", "retry-after"),
        # How long a browser may go by one answer to "may I?", in seconds: Chromium's own limit.
        max_age=7200,
        # Chromium asks this for a gateway on the reader's own machine or network. Not for just any page.
        allow_private_network="*" not in origins,
    )


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse(error.body(), error.status, {"x-request-id": uuid.uuid4().hex, **error.headers()})


async def _not_found(request: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    reason = next((reason for known, reason in _NOT_SERVED.items() if path.startswith(known)), error.detail)
    refused = Refused(error.status_code, f"{request.method} {path}: {reason}", code="unknown_url")
    return JSONResponse(refused.body(), error.status_code, error.headers)
