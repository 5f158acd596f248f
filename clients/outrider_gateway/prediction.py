"""OpenAI's `prediction`: the text that the caller expects, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_client.results import Result
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields
from outrider_gateway.message_text import content_text


def read_prediction(fields: Fields) -> str | None:
    """The text of the field `prediction`; None when there is none.

    Raises `BadField` for one that is malformed.
    """
    inner = fields.inner("prediction")
    if inner is None:
        return None
    kind = inner.text("type", "content")
    if kind != "content":
        raise BadField(inner.path("type"), "must be content", "invalid_value")
    text = content_text(inner.take("content"), inner.path("content"))
    inner.end()
    return text


def prediction_details(predicted: bool, results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """The part of `usage` that says what became of a prediction; empty where none was given."""
    if not predicted:
        return {}
    return {
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(result.accepted_prediction_tokens for result in results),
            "rejected_prediction_tokens": sum(result.rejected_prediction_tokens for result in results),
        }
    }
