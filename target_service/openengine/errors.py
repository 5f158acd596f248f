"""Errors of streams that were accepted: the last message of such a stream, whose status is OK."""

from __future__ import annotations

from outrider.errors import (
    DeadlineExceeded,
    Draining,
    InvalidField,
    NotSupported,
    OutriderError,
    PositionOutOfRange,
    QuotaExceeded,
)
from outrider.openengine import openengine_pb2 as pb

_CODES: dict[type[OutriderError], pb.ErrorCode.ValueType] = {
    InvalidField: pb.ERROR_CODE_INVALID_ARGUMENT,
    PositionOutOfRange: pb.ERROR_CODE_INVALID_ARGUMENT,
    NotSupported: pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    QuotaExceeded: pb.ERROR_CODE_OVERLOADED,
    DeadlineExceeded: pb.ERROR_CODE_CANCELLED,
    Draining: pb.ERROR_CODE_DRAINING,
}


def engine_error(error: OutriderError) -> pb.EngineError:
    """The error as a stream's last message has it, with Outrider's own reason in `details`."""
    message = pb.EngineError(
        code=_CODES.get(type(error), pb.ERROR_CODE_INTERNAL),
        message=error.message,
        retryable=error.retry_after is not None,
    )
    if error.retry_after is not None:
        message.retry_after_ms = round(error.retry_after * 1e3)
    message.details.update({"outrider.reason": error.reason})
    return message
