"""OpenAI's `prediction`: the text that the caller expects. The one place that knows whether targets can use it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_client.results import Result
from outrider_gateway.failures import BadField
from outrider_gateway.fields import Fields
from outrider_gateway.message_text import content_text

# Whether the contract has a field for it. What is read below then goes into the call that `answering.py` makes.
TAKEN = False


def read_prediction(fields: Fields) -> str | None:
    """The text of the field `prediction`; None when there is none.

    Raises `BadField` for one that is malformed, and for every other as long as targets have no use for it: a caller
    who pays for a prediction should not be led to think that it was used.
    """
    inner = fields.inner("prediction")
    if inner is None:
        return None
    kind = inner.text("type", "content")
    if kind != "content":
        raise BadField(inner.path("type"), "must be content", "invalid_value")
    text = content_text(inner.take("content"), inner.path("content"))
    inner.end()
    if not TAKEN:
        raise BadField(fields.path("prediction"), "is not supported by this server yet", "unsupported_parameter")
    return text


def prediction_details(predicted: bool, results: Sequence[Result]) -> dict[str, dict[str, int]]:
    """The part of `usage` that says what became of a prediction; empty where none was given."""
    if not predicted:
        return {}
    drafted = sum(result.speculation.drafted_tokens for result in results)
    accepted = sum(result.speculation.accepted_tokens for result in results)
    return {
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
    }
