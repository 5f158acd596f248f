"""One table of errors: the drawing in the module, the classes, and what travels agree."""

from __future__ import annotations

import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from outrider.errors import DOMAIN, InvalidField, OutriderError, QuotaExceeded, all_errors
from outrider.wire.trees import error_of, error_of_rpc, status_of


def make(kind: type[OutriderError]) -> OutriderError:
    if kind is InvalidField:
        return InvalidField("tree.parents[3]", "must lie before row 3")
    return kind("a sentence", limit=3, name="x")


def detail(status: status_pb2.Status, kind: type) -> object:
    for packed in status.details:
        found = kind()
        if packed.Unpack(found):
            return found
    return None


def test_every_error_names_its_code_and_what_it_means() -> None:
    assert all(kind.code is not OutriderError.code and kind.__doc__ != OutriderError.__doc__ for kind in all_errors())


def test_a_kind_of_a_kind_is_of_the_same_code_and_reason() -> None:
    class Refused(QuotaExceeded):
        """A quota of one's own."""

    assert (Refused.code, Refused.reason, Refused.retry_after) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUOTA_EXCEEDED",
        1.0,
    )


def test_reasons_are_unique_and_of_the_form_google_asks_for() -> None:
    reasons = [kind.reason for kind in all_errors()]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]{2,62}", reason) for reason in reasons)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_every_error_travels_and_comes_back_typed(kind: type[OutriderError]) -> None:
    error = make(kind)
    status = status_pb2.Status.FromString(status_of(error).SerializeToString())
    assert status.code == kind.code.value[0] and status.message == error.message
    info = detail(status, error_details_pb2.ErrorInfo)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason, dict(info.metadata)) == (DOMAIN, kind.reason, dict(error.metadata))
    back = error_of(status)
    assert type(back) is kind and back.message == error.message and back.metadata == error.metadata
    retry = detail(status, error_details_pb2.RetryInfo)
    assert (retry is not None) == (kind.retry_after is not None)


def test_a_bad_field_has_its_path_in_bad_request() -> None:
    status = status_of(InvalidField("tree.parents[3]", "must lie before row 3"))
    bad = detail(status, error_details_pb2.BadRequest)
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert [(v.field, v.description) for v in bad.field_violations] == [("tree.parents[3]", "must lie before row 3")]


def test_a_full_queue_says_when_to_come_back() -> None:
    retry = detail(status_of(QuotaExceeded("full")), error_details_pb2.RetryInfo)
    assert isinstance(retry, error_details_pb2.RetryInfo) and retry.retry_delay.seconds == 1


@pytest.mark.parametrize(
    "info",
    [
        None,
        error_details_pb2.ErrorInfo(domain="elsewhere.example", reason="QUOTA_EXCEEDED"),
        error_details_pb2.ErrorInfo(domain=DOMAIN, reason="FROM_A_NEWER_VERSION", metadata={"a": "b"}),
    ],
    ids=["no details", "another domain", "unknown reason"],
)
def test_a_foreign_status_becomes_a_plain_error(info: error_details_pb2.ErrorInfo | None) -> None:
    status = status_pb2.Status(code=8, message="no")
    if info is not None:
        status.details.add().Pack(info)
    error = error_of(status)
    assert type(error) is OutriderError and error.message == "no"


@pytest.mark.parametrize("mismatch", [False, True], ids=["no details", "details of another status"])
def test_a_failed_transport_becomes_a_plain_error(mismatch: bool) -> None:
    trailing = grpc.aio.Metadata()
    if mismatch:
        trailing.add("grpc-status-details-bin", status_of(QuotaExceeded("full")).SerializeToString())
    call = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailing, details="gone")
    error = error_of_rpc(call)
    assert type(error) is OutriderError
    assert error.message == "gone" and error.metadata == {"code": "UNAVAILABLE"}


def test_a_call_with_details_gives_its_error_back() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status_of(QuotaExceeded("full")).SerializeToString()))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(error_of_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, "full")), QuotaExceeded)
