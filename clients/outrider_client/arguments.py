"""What callers give to calls, held to its types by name: protobuf's own errors name no argument."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

from outrider.errors import InvalidField
from outrider.sampling import SamplingParams
from outrider.v1 import target_pb2, tree_pb2
from outrider.wire.trees import sampling_to_pb
from outrider_client.messages import ChatOptions, MessageLike, chat_to_pb

_TEXTS, _NUMBERS = "a tuple of strings", "a sequence of whole numbers"
# Fields of several values that one text would be taken for, letter by letter.
_SEQUENCES = {"stop": _TEXTS, "stop_token_ids": _NUMBERS}


def check_options(**expected: tuple[object, type | tuple[type, ...]]) -> None:
    """Raise `TypeError` for anything but None and the type that a name expects, such as a dict for an options class."""
    for name, (value, kind) in expected.items():
        if value is not None and not isinstance(value, kind):
            hint = "; a conversation goes to chat()" if name == "text" else ""
            wanted = kind.__name__ if isinstance(kind, type) else "a number"
            raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}{hint}")


def sampling_message(params: SamplingParams) -> tree_pb2.SamplingParameters:
    """The message of sampling parameters. Raises `TypeError` or `InvalidField` with the name of the first that does not
    fit into it."""
    for name, wanted in _SEQUENCES.items():
        if isinstance(value := getattr(params, name), str | bytes):
            raise TypeError(f"sampling.{name}: expected {wanted}, got {type(value).__name__}")
    try:
        return sampling_to_pb(params)
    except (TypeError, ValueError):
        for field in tree_pb2.SamplingParameters.DESCRIPTOR.fields:
            if field.message_type is None or field.name == "logit_bias":
                _try_field(field.name, getattr(params, field.name, None))
        raise


def _try_field(name: str, value: Any) -> None:
    try:
        tree_pb2.SamplingParameters(**{name: value})
    except TypeError as error:
        raise TypeError(f"sampling.{name}: {error}") from None
    except ValueError as error:
        raise InvalidField(f"sampling.{name}", str(error)) from None


def set_input(
    request: target_pb2.GenerateRequest,
    text: str,
    messages: Sequence[MessageLike],
    chat_options: ChatOptions,
    token_ids: Sequence[int],
) -> None:
    """Set what a request continues. Raises `InvalidField` for more or less than one input and for text that is no
    Unicode, `TypeError` for values of other types."""
    if not isinstance(token_ids, Sized) or isinstance(token_ids, str | bytes):
        raise TypeError(f"token_ids: expected {_NUMBERS}, got {type(token_ids).__name__}")
    if (bool(messages) + bool(text) + bool(len(token_ids))) != 1:
        raise InvalidField("input", "needs exactly one of messages, text and token_ids, and not empty")
    try:
        if text:
            request.text = text
        elif messages:
            request.chat.CopyFrom(chat_to_pb(messages, chat_options))
        else:
            extend(request.tokens, token_ids)
    except UnicodeEncodeError as error:
        raise InvalidField("text" if text else "chat.messages", f"is no text of Unicode: {error.reason}") from None


def extend(tokens: target_pb2.TokenInput, token_ids: Sequence[int], name: str = "token_ids") -> None:
    """Add token ids. Raises `InvalidField` for numbers that no id can be, `TypeError` for what is no whole number."""
    try:
        tokens.token_ids.extend(token_ids)
    except ValueError as error:
        raise InvalidField("tokens.token_ids", str(error)) from None
    except TypeError as error:
        raise TypeError(f"{name}: expected {_NUMBERS}: {error}") from None


def predicted(prediction: str | Sequence[int]) -> target_pb2.Prediction:
    """The message of an expected answer. Raises as `extend` does."""
    if isinstance(prediction, str):
        return target_pb2.Prediction(text=prediction)
    found = target_pb2.Prediction(tokens=target_pb2.TokenInput())
    if isinstance(prediction, bytes):
        raise TypeError(f"prediction: expected str or {_NUMBERS}, got bytes")
    extend(found.tokens, prediction, "prediction")
    return found
