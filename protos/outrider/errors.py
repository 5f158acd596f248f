"""Every error the API can return, and its gRPC status.

OutriderError
├── InvalidField          INVALID_ARGUMENT     a field of a request breaks its documented limits
├── PositionOutOfRange    OUT_OF_RANGE         longer than the model's context
├── UnknownModel          NOT_FOUND
├── UnknownSequence       NOT_FOUND            not open, or not this caller's
├── UnknownCorpus         NOT_FOUND
├── SequenceExists        ALREADY_EXISTS
├── StepReplayed          ABORTED              a step that lies behind, or a replay with another payload
├── StepSkipped           FAILED_PRECONDITION  a step that lies ahead
├── WrongRoot             FAILED_PRECONDITION  a tree whose root is not the last committed token
├── WrongVocabulary       FAILED_PRECONDITION  draft and target do not speak the same token ids
├── NotSupported          FAILED_PRECONDITION  this drafter or model cannot do what was asked
├── QuotaExceeded         RESOURCE_EXHAUSTED   a queue, a tenant's limit or a corpus quota is full
├── CreditExceeded        RESOURCE_EXHAUSTED   a peer that sends past its credit
├── Unauthenticated       UNAUTHENTICATED
├── PermissionDenied      PERMISSION_DENIED
├── DeadlineExceeded      DEADLINE_EXCEEDED
├── Draining              UNAVAILABLE          the service is about to stop
├── WeightsChanged        UNAVAILABLE          the model's weights were exchanged under the request; ask again
├── DraftUnavailable      UNAVAILABLE          never reaches a client: the target goes on without drafts
├── EngineDead            UNAVAILABLE          the engine loop failed; the process is about to exit, another may serve
└── Loading               UNAVAILABLE          what serves is being loaded; ask again, or ask another
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc

DOMAIN = "outrider"


class OutriderError(Exception):
    """An error with a stable reason, a gRPC status and facts a program can read.

    Messages never hold prompt text or token ids: they travel into logs.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    # Seconds after which trying again makes sense; None when it does not.
    retry_after: float | None = None

    def __init__(self, message: str, **metadata: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}


class InvalidField(OutriderError):
    """A field of a request breaks its documented limits; `field` is its path, such as `tree.parents[3]`."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", field=field)
        self.field = field
        self.problem = problem


class PositionOutOfRange(OutriderError):
    code = grpc.StatusCode.OUT_OF_RANGE
    reason = "POSITION_OUT_OF_RANGE"


class UnknownModel(OutriderError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class UnknownSequence(OutriderError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_SEQUENCE"


class UnknownCorpus(OutriderError):
    code = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_CORPUS"


class SequenceExists(OutriderError):
    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "SEQUENCE_EXISTS"


class StepReplayed(OutriderError):
    code = grpc.StatusCode.ABORTED
    reason = "STEP_REPLAYED"


class StepSkipped(OutriderError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STEP_SKIPPED"


class WrongRoot(OutriderError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_ROOT"


class WrongVocabulary(OutriderError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "WRONG_VOCABULARY"


class NotSupported(OutriderError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "NOT_SUPPORTED"


class QuotaExceeded(OutriderError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"
    retry_after: float | None = 1.0

    def after(self, seconds: float | None) -> QuotaExceeded:
        """The error, with when to try again; None is never."""
        self.retry_after = seconds
        return self


class CreditExceeded(OutriderError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "CREDIT_EXCEEDED"


class Unauthenticated(OutriderError):
    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(OutriderError):
    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class DeadlineExceeded(OutriderError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Draining(OutriderError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAINING"
    retry_after = 1.0


class WeightsChanged(OutriderError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "WEIGHTS_CHANGED"
    retry_after = 0.1


class DraftUnavailable(OutriderError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "DRAFT_UNAVAILABLE"
    retry_after = 1.0


class EngineDead(OutriderError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "ENGINE_DEAD"
    retry_after = 1.0


class Loading(OutriderError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "LOADING"
    retry_after = 1.0


def all_errors() -> tuple[type[OutriderError], ...]:
    """Every concrete error class, for the table in the docs and the tests that hold it to the code."""
    return tuple(OutriderError.__subclasses__())
