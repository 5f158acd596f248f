"""Every error the API can return, and its gRPC status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from grpc import StatusCode

DOMAIN = "outrider"


class OutriderError(Exception):
    """An error with a stable reason, a gRPC status and metadata for programs. Messages never hold prompt text or token
    ids: they are logged."""

    code: ClassVar[StatusCode] = StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    retry_after: float | None = None  # seconds after which a retry makes sense; None if it does not

    def __init_subclass__(
        cls, *, code: StatusCode | None = None, reason: str = "", retry_after: float | None = None
    ) -> None:
        """Each class has its own code and reason; a subclass without `code` inherits both."""
        super().__init_subclass__()
        if code is not None:
            cls.code, cls.reason, cls.retry_after = code, reason, retry_after

    def __init__(self, message: str, **metadata: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.metadata: Mapping[str, str] = {key: str(value) for key, value in metadata.items()}


class InvalidField(OutriderError, code=StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
    """A field of a request breaks its documented limits; `field` is its path, such as `tree.parents[3]`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", field=field)
        self.field = field
        self.problem = problem


def check_most(field: str, count: int, most: int, unit: str = "entries") -> None:
    """Raise `InvalidField` for a field that has more than so many entries, or other units."""
    if count > most:
        raise InvalidField(field, f"has more than {most} {unit}")


class PositionOutOfRange(OutriderError, code=StatusCode.OUT_OF_RANGE, reason="POSITION_OUT_OF_RANGE"):
    """Longer than the model's context."""


class UnknownModel(OutriderError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_MODEL"):
    """No model of that name is served or known."""


class UnknownSequence(OutriderError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_SEQUENCE"):
    """Not open, or not this caller's."""


class UnknownCorpus(OutriderError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_CORPUS"):
    """No shared corpus of that name, or none of this caller's."""


class SequenceExists(OutriderError, code=StatusCode.ALREADY_EXISTS, reason="SEQUENCE_EXISTS"):
    """The sequence is open already."""


class StepReplayed(OutriderError, code=StatusCode.ABORTED, reason="STEP_REPLAYED"):
    """The step is an earlier one, or a replay with another payload."""


class StepSkipped(OutriderError, code=StatusCode.FAILED_PRECONDITION, reason="STEP_SKIPPED"):
    """The step is not the next one."""


class WrongRoot(OutriderError, code=StatusCode.FAILED_PRECONDITION, reason="WRONG_ROOT"):
    """The tree's root is not the last committed token."""


class WrongVocabulary(OutriderError, code=StatusCode.FAILED_PRECONDITION, reason="WRONG_VOCABULARY"):
    """Draft and target have different vocabularies."""


class NotSupported(OutriderError, code=StatusCode.FAILED_PRECONDITION, reason="NOT_SUPPORTED"):
    """This drafter or model does not support the request."""


class QuotaExceeded(OutriderError, code=StatusCode.RESOURCE_EXHAUSTED, reason="QUOTA_EXCEEDED", retry_after=1.0):
    """A queue, a tenant's limit or a corpus quota is full."""

    def after(self, seconds: float | None) -> QuotaExceeded:
        """This error, to be retried after `seconds`; None is never."""
        self.retry_after = seconds
        return self


class CreditExceeded(OutriderError, code=StatusCode.RESOURCE_EXHAUSTED, reason="CREDIT_EXCEEDED"):
    """The peer sends more than its credit."""


class Unauthenticated(OutriderError, code=StatusCode.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """No token, or an unknown one."""


class PermissionDenied(OutriderError, code=StatusCode.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """The caller may not do this."""


class DeadlineExceeded(OutriderError, code=StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The deadline passed before the answer was complete."""


class Draining(OutriderError, code=StatusCode.UNAVAILABLE, reason="DRAINING", retry_after=1.0):
    """The service is about to stop."""


class WeightsChanged(OutriderError, code=StatusCode.UNAVAILABLE, reason="WEIGHTS_CHANGED", retry_after=0.1):
    """The model's weights were replaced during the request; retry."""


class DraftUnavailable(OutriderError, code=StatusCode.UNAVAILABLE, reason="DRAFT_UNAVAILABLE", retry_after=1.0):
    """Never sent to a client: the target continues without drafts."""


class EngineDead(OutriderError, code=StatusCode.UNAVAILABLE, reason="ENGINE_DEAD", retry_after=1.0):
    """The engine loop failed; the process is about to exit, another may serve."""


class LogitsNotFinite(OutriderError, code=StatusCode.DATA_LOSS, reason="LOGITS_NOT_FINITE"):
    """The model computed NaN or infinity where the next token is chosen; the other requests go on."""


class Loading(OutriderError, code=StatusCode.UNAVAILABLE, reason="LOADING", retry_after=1.0):
    """The model or drafter is being loaded; retry, or call another service."""


def all_errors() -> tuple[type[OutriderError], ...]:
    """Every concrete error class."""
    return tuple(OutriderError.__subclasses__())
