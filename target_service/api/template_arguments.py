"""What a caller gives to the model's chat template by name."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from outrider.admission.prompt_limits import MAX_TEMPLATE_BYTES
from outrider.errors import InvalidField, check_most
from target_service.text.chat_template import GIVEN

_FIELD = "chat.template_arguments"


def template_arguments(given: Struct, special_names: Collection[str]) -> dict[str, Any]:
    """The arguments as Python values, whole numbers as such: a `Struct` has only floats, and a template would write
    "512.0". Raises `InvalidField` for too many, for numbers that JSON does not have, and for names that the template
    gets from the target, among them those of special tokens."""
    if not given.fields:
        return {}
    check_most(_FIELD, given.ByteSize(), MAX_TEMPLATE_BYTES, "bytes")
    taken = GIVEN.union(special_names)
    for name in given.fields:
        if name in taken:
            raise InvalidField(f"{_FIELD}.{name}", "is given to the template by the target")
    try:
        arguments: dict[str, Any] = _whole(MessageToDict(given))
    except ValueError:
        raise InvalidField(_FIELD, "has a number that is not finite") from None
    return arguments


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
