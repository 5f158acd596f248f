"""What a request can be refused with, in OpenAI's form: a status, and which field was wrong.

Refused
├── BadField      400   a field of the request breaks its limits, or is not supported
├── TooLarge      413   the body has more than `limit` bytes
├── TooMany       429   the caller, or all together, have as much under way as they may
├── GatewayFailed 500   an error of the gateway's own; which is in the log alone, as it may quote the request
└── NoTarget      503   no target is healthy, and why none is

Errors of the contract become one of the rows of `_STATUS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidField, Loading, OutriderError, PositionOutOfRange, UnknownCorpus, UnknownModel
from outrider_client.failures import ServiceUnreachable

# By the name of the gRPC status: HTTP status and OpenAI's type of error.
_STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "OUT_OF_RANGE": (400, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
}
# Chosen.
_RETRY_SECONDS = 1.0
# Of a message. Chosen: more than any of ours.
_MOST_CHARACTERS = 1000


@dataclass(eq=False)
class Refused(Exception):
    """An answer that is an error. `param` names the field at fault, `code` is for programs."""

    status: int
    message: str
    kind: str = field(default="invalid_request_error", kw_only=True)
    param: str | None = field(default=None, kw_only=True)
    code: str | None = field(default=None, kw_only=True)
    retry_after: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        # Names of fields come from the caller, and may be as long as a body.
        self.message, self.param = _shortened(self.message), self.param and _shortened(self.param)
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What else a client should know before it tries again."""
        # Whole seconds, of which too few would be an invitation to come back at once.
        headers = {} if self.retry_after is None else {"retry-after": f"{math.ceil(self.retry_after)}"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class BadField(Refused):
    def __init__(self, param: str, problem: str, code: str | None = None) -> None:
        super().__init__(400, f"{param}: {problem}", param=param, code=code)


class TooLarge(Refused):
    def __init__(self, limit: int) -> None:
        super().__init__(413, f"the body has more than {limit} bytes", code="request_too_large")


class TooMany(Refused):
    def __init__(self, message: str) -> None:
        super().__init__(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=_RETRY_SECONDS)


class GatewayFailed(Refused):
    def __init__(self) -> None:
        super().__init__(500, "the gateway failed", kind="server_error")


class NoTarget(Refused):
    def __init__(self, cause: str) -> None:
        message = f"no target is healthy: {cause}"
        super().__init__(503, message, kind="server_error", code="target_unavailable", retry_after=_RETRY_SECONDS)


def refusal(error: OutriderError | ServiceUnreachable, fields: Mapping[str, str]) -> Refused:
    """The refusal that a failed call's caller gets. `fields` has the request's names of the contract's fields."""
    if isinstance(error, ServiceUnreachable):
        return NoTarget(str(error))
    # A plain one is not ours, but the transport's or a proxy's.
    code_name = error.metadata.get("code", "") if type(error) is OutriderError else error.code.name
    status, kind = _STATUS.get(code_name, (500, "server_error"))
    param, message, code = _named(error, fields)
    return Refused(status, message, kind=kind, param=param, code=code, retry_after=error.retry_after)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"


def _named(error: OutriderError, fields: Mapping[str, str]) -> tuple[str | None, str, str | None]:
    """The field at fault, the message and the code."""
    if isinstance(error, InvalidField):
        param = _renamed(error.field, fields)
        return param, f"{param}: {error.problem}", "invalid_value"
    if isinstance(error, UnknownModel):
        served = error.metadata.get("served")
        return "model", f"{error.message}: {served}" if served else error.message, "model_not_found"
    if isinstance(error, PositionOutOfRange):
        return fields["input"], _with_limits(error, fields), "context_length_exceeded"
    if isinstance(error, UnknownCorpus):
        return "outrider.corpus", error.message, "corpus_not_found"
    if isinstance(error, Loading):
        return None, loading_message(error), "loading"
    code = "invalid_api_key" if error.reason == "UNAUTHENTICATED" else error.reason.lower()
    return None, error.message, code


def loading_message(error: Loading) -> str:
    """The message with the time that loading has taken, where the service says it."""
    seconds = error.metadata.get("seconds")
    return f"{error.message} ({seconds} s so far)" if seconds else error.message


def _with_limits(error: OutriderError, fields: Mapping[str, str]) -> str:
    """The message with the request's name of the field, and with the numbers that the contract has apart."""
    path, colon, problem = error.message.partition(": ")
    message = f"{_renamed(path, fields)}: {problem}" if colon else error.message
    limits = ((name, value) for name, value in error.metadata.items() if name in ("tokens", "bytes", "limit"))
    numbers = ", ".join(f"{name} {value}" for name, value in limits)
    return f"{message} ({numbers})" if numbers else message


def _renamed(path: str, fields: Mapping[str, str]) -> str:
    """`sampling.top_p` is `top_p`, `chat.messages[2].role` is `messages[2].role`."""
    path = path.removeprefix("sampling.")
    for name in sorted(fields, key=len, reverse=True):
        if path == name or path.startswith((f"{name}.", f"{name}[")):
            return fields[name] + path[len(name) :]
    return path
